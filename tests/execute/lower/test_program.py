"""No instruction of a program uses a value that other instructions of its pass may still write."""

from collections.abc import Hashable, Iterator

import pytest
import torch

from tests.execute.native_decoding.stepping import built, without_steps
from tests.native.machine import needs
from tests.nn.grid import CAUSAL, COVERING, fixed_length, make, name
from workhorse.execute.lower.program import Program, Writer
from workhorse.execute.lower.step import translate
from workhorse.execute.record import CannotTranslate
from workhorse.native.steps import Op
from workhorse.nn import DecoderConfig
from workhorse.transforms.quantization import FormatName

pytestmark = [needs("steps"), needs("decoding")]
CONFIGS = [config for config in CAUSAL if fixed_length(config) is None]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: name(COVERING.index(config)))
def test_what_is_used_was_waited_for(config: DecoderConfig) -> None:
    try:
        program = translate(without_steps(make(config)))
    except CannotTranslate as reason:
        pytest.skip(str(reason))
    _check(program)


@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_what_is_packed_was_waited_for(format: FormatName | None) -> None:
    _check(translate(without_steps(built(), format)))


def test_all_wait_for_what_one_of_them_uses() -> None:
    writer = Writer(8, torch.float32)
    x, product, scaled, total, logits = (writer.reserve(8) for _ in range(5))
    writer.write(Op.EMBED, x)
    writer.write(Op.LINEAR, product, x)
    writer.write(Op.SCALE, scaled, x)  # need not wait
    writer.write(Op.ADD, total, product, scaled)
    writer.write(Op.LINEAR, logits, total)
    program = writer.program()
    assert program.instructions[:, 1].tolist() == [0, 1, 1, 0, 1]
    assert program.instructions[:, 2].tolist() == [0, 0, 0, 1, 0]
    _check(program)


def test_what_is_read_is_not_written_before() -> None:
    writer = Writer(8, torch.float32)
    x, y, product, logits = (writer.reserve(8) for _ in range(4))
    writer.write(Op.EMBED, x)
    writer.write(Op.EMBED_POSITION, y)
    writer.write(Op.LINEAR, product, x)
    writer.write(Op.SCALE, x, y)
    writer.write(Op.LINEAR, logits, x)
    program = writer.program()
    assert program.instructions[:, 1].tolist() == [0, 0, 1, 1, 1]
    _check(program)


def _check(program: Program) -> None:
    written: set[Hashable] = set()
    read: set[Hashable] = set()
    for stage in _stages(program):
        if stage[0][1]:
            written, read = set(), set()
        uses = [_uses(instruction) for instruction in stage]
        writes = set[Hashable]().union(*(to for to, _ in uses))
        reads = set[Hashable]().union(*(source for _, source in uses))
        assert not written & (writes | reads)
        assert not read & writes
        written |= writes
        read |= reads - writes


def _stages(program: Program) -> Iterator[list[list[int]]]:
    """Each instruction with those that join it; they run together for one row at a time."""
    stage: list[list[int]] = []
    for instruction in program.instructions.tolist():
        joins = instruction[2]
        if joins:
            assert stage
            assert not instruction[1]
            assert all(Op(one[0]).is_rowwise for one in (*stage, instruction))
        elif stage:
            yield stage
            stage = []
        stage.append(instruction)
    yield stage


def _uses(instruction: list[int]) -> tuple[set[Hashable], set[Hashable]]:
    """The registers, or the cache, that an instruction writes and reads."""
    op, _, _, to, source, other = instruction[:6]
    reads: set[Hashable] = {source, other} - {-1}
    match Op(op):
        case Op.STORE:
            return {"cache"}, reads
        case Op.ATTEND:  # `other` makes it wait for the stored keys and values
            return {to}, {source, "cache"}
        case Op.CONVOLVE:  # so does `other`, which is also `to`
            return {to}, {source, "cache"}
        case _:
            return {to}, reads
