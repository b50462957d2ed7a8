"""A lower level hides the instructions above it, from the compiler and from all queries."""

import pytest
import torch

from workhorse.devices import instructions
from workhorse.devices.instructions import (
    LEVELS,
    NATIVE,
    SWITCH,
    WIDENED,
    compiler_flags,
    cpu_has,
    used,
)
from workhorse.devices.names import training_dtype
from workhorse.errors import WorkhorseError
from workhorse.native import matrix_unit, training
from workhorse.native.build import Unavailable

CPU = torch.device("cpu")
ALL = frozenset().union(*(level.adds for level in LEVELS.values()))


@pytest.fixture(autouse=True)
def _cpu_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "_on_this_cpu", lambda: ALL | {"avx512_fp16"})
    instructions._checked.cache_clear()
    yield
    instructions._checked.cache_clear()


@pytest.mark.parametrize("value", [None, "", "0", "1"])
def test_without_a_level_the_cpu_has_what_it_has(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(SWITCH, value)
    assert cpu_has("avx512_fp16")
    assert not cpu_has("sve")
    assert set(used()) == ALL
    assert compiler_flags() == NATIVE


@pytest.mark.parametrize("maker", ["GenuineIntel", "AuthenticAMD", ""])
def test_pairs_of_bfloat16_are_multiplied_where_that_is_quick_or_asked_for(
    monkeypatch: pytest.MonkeyPatch, maker: str
) -> None:
    monkeypatch.setattr(instructions, "cpuinfo_field", lambda _: maker)
    monkeypatch.delenv(SWITCH, raising=False)
    assert WIDENED not in compiler_flags()  # the CPU has a matrix unit
    monkeypatch.setattr(instructions, "_on_this_cpu", lambda: ALL - LEVELS["amx"].adds)
    assert (WIDENED in compiler_flags()) == (maker == "GenuineIntel")
    monkeypatch.setenv(SWITCH, "avx512-bf16")
    assert WIDENED not in compiler_flags()


@pytest.mark.parametrize(
    ("level", "there", "hidden"),
    [
        ("x86-64-v2", "sse4_2", "avx2"),
        ("x86-64-v3", "avx2", "avx512_f"),
        ("x86-64-v4", "avx512_f", "avx512_vnni"),
        ("avx512-vnni", "avx512_vnni", "avx512_bf16"),
        ("avx512-bf16", "avx512_bf16", "amx_bf16"),
        ("avx512-bf16-widened", "avx512_bf16", "amx_bf16"),
        ("amx-emulated", "amx_bf16", "amx_int8"),
        ("amx", "amx_bf16", "avx512_fp16"),
    ],
)
def test_a_level_has_what_is_below_it_and_nothing_above(
    monkeypatch: pytest.MonkeyPatch, level: str, there: str, hidden: str
) -> None:
    monkeypatch.setenv(SWITCH, level)
    assert cpu_has("sse4_2")
    assert cpu_has(there)
    assert not cpu_has(hidden)
    assert compiler_flags() == LEVELS[level].flags


def test_what_is_chosen_by_the_cpu_follows_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "x86-64-v3")
    assert training_dtype("auto", CPU) == torch.float32
    assert training._attention_types() == {torch.float32, torch.bfloat16}
    with pytest.raises(Unavailable, match="the CPU has no matrix unit for bfloat16"):
        matrix_unit.load(wait=False)
    monkeypatch.setenv(SWITCH, "x86-64-v4")
    assert training._attention_types() == {torch.float32, torch.bfloat16}
    monkeypatch.setenv(SWITCH, "avx512-bf16")
    assert training_dtype("auto", CPU) == torch.bfloat16
    assert training._attention_types() == {torch.float32, torch.bfloat16}
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert training._attention_types() == {torch.float32}
    monkeypatch.setenv(SWITCH, "x86-64-v2")
    assert training._attention_types() == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "x86-64-v5",
            r"WORKHORSE_NATIVE=x86-64-v5 is not a level of CPU instructions; did you mean '.*-v4'",
        ),
        (
            "avx512-bf16",
            "WORKHORSE_NATIVE=avx512-bf16 is not supported by this CPU; "
            "choose one of x86-64-v2, x86",
        ),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    monkeypatch.setattr(instructions, "_on_this_cpu", lambda: ALL - LEVELS["avx512-bf16"].adds)
    monkeypatch.setenv(SWITCH, value)
    for asks in (lambda: cpu_has("sse4_2"), compiler_flags):
        with pytest.raises(WorkhorseError, match=f"^{message}"):
            asks()


def test_a_cpu_of_another_kind_has_no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "_on_this_cpu", lambda: frozenset({"neon", "bf16"}))
    monkeypatch.setenv(SWITCH, "x86-64-v2")
    with pytest.raises(
        WorkhorseError, match="is not supported by this CPU, which supports no level; unset it"
    ):
        compiler_flags()
