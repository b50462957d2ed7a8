"""Compiled steps return the same logits as plain steps, and are compiled once."""

import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.execute.passes import compiled, last_logits
from tests.execute.windowed import LOCAL_AND_GLOBAL, logits_along, make, texts
from tests.native.machine import OPERATORS, needs
from tests.nn.paged import paged
from workhorse.errors import WorkhorseError
from workhorse.execute.compiled import compiled_step
from workhorse.execute.compiled.compiled_step import CompiledStep
from workhorse.execute.native_decoding.native_step import NativeStepBackend
from workhorse.nn import DecoderConfig
from workhorse.nn.cache.paged import BLOCK

# PyTorch's compiler imports what PyTorch itself calls deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning"),
    pytest.mark.early,
]


@pytest.fixture(scope="module")
def _compiler() -> None:
    """Skip the test unless PyTorch's compiler finds a C++ compiler."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def folder(_compiler: None, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder with the program for one sequence, compiled once for all test processes."""
    return _programs("programs", tmp_path_factory, worker_id)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The same folder, but the program calls PyTorch's operators: no C++ is compiled."""
    whole = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda f, **_: whole(f, fullgraph=True, backend="eager"))
        return _programs("traced", tmp_path_factory, worker_id)


def _programs(name: str, factory: pytest.TempPathFactory, worker_id: str) -> Path:
    own = factory.getbasetemp()
    shared = (own if worker_id == "master" else own.parent) / name
    with FileLock(f"{shared}.lock"):
        texts(compiled(make(), shared), 1, 60)
    return shared


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "programs"))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The list that grows with every compilation."""
    seen: list[int] = []
    compile_step = compiled_step.compile_step

    def counting(*arguments: object) -> object:
        seen.append(1)
        return compile_step(*arguments)

    monkeypatch.setattr(compiled_step, "compile_step", counting)
    return seen


def test_one_program_serves_all_lengths_capacities_and_weights(
    folder: Path, compilations: list[int]
) -> None:
    for seed, length in ((0, 30), (1, 300)):  # the second one uses more cache slots
        plain, backend = make(seed), compiled(make(seed), folder)
        tokens = torch.randint(0, 61, (1, length))
        pairs = zip(logits_along(plain, tokens), logits_along(backend, tokens), strict=True)
        for expected, found in pairs:
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not compilations


@needs("steps")
def test_what_no_native_step_computes_is_compiled(copied: Path) -> None:
    """Attention without a native kernel has no instruction, so the compiled step is used."""
    fallback = compiled(make(), copied)
    backend = NativeStepBackend(fallback, OPERATORS)
    assert texts(backend, 1, 40) == texts(make(), 1, 40)
    assert isinstance(fallback.step, CompiledStep)
    assert fallback.step.programs
    assert backend.announcement == "decode: compiled, whole steps"


def test_a_kept_program_is_read_and_a_damaged_one_is_made_again(
    copied: Path, compilations: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    expected = texts(make(), 1, 12)

    def fresh() -> list[tuple[int, ...]]:
        return texts(compiled(make(), copied), 1, 12)

    assert fresh() == expected
    assert not compilations
    for program in copied.iterdir():
        program.write_bytes(program.read_bytes()[:1000])
    assert fresh() == expected
    assert compilations == [1]
    assert "cannot be loaded and is compiled again" in caplog.text


@pytest.mark.parametrize("what", ["sources_digest", "used"])
def test_a_program_of_other_operators_is_not_read(
    traced: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    kept = set(traced.iterdir())
    monkeypatch.setattr(compiled_step, what, lambda: "another")
    asked: list[object] = []

    def compile_step(*arguments: object) -> None:
        asked.append(arguments)
        raise WorkhorseError("not compiled in this test")

    monkeypatch.setattr(compiled_step, "compile_step", compile_step)
    with pytest.raises(WorkhorseError, match="not compiled in this test"):
        texts(compiled(make(), traced), 1, 4)
    assert len(asked) == 1
    assert set(traced.iterdir()) == kept


def test_a_folder_that_cannot_be_written_costs_only_the_keeping(
    traced: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = compiled(make(), traced)
    texts(known, 1, 4)
    assert isinstance(known.step, CompiledStep)
    (program,) = known.step.programs.values()
    monkeypatch.setattr(compiled_step, "compile_step", lambda *arguments: program)
    (tmp_path / "file").touch()
    backend = compiled(make(), tmp_path / "file" / "programs")
    assert texts(backend, 1, 4) == texts(make(), 1, 4)
    assert "the compiled step cannot be saved" in caplog.text


def test_too_many_tokens_are_refused_as_without_compilation(tmp_path: Path) -> None:
    backend = compiled(make(), tmp_path)
    with torch.no_grad():
        cache = paged(backend.decoder, 1, 4)  # two blocks, since the last one may be partly used
        last_logits(backend, torch.ones(1, 2 * BLOCK, dtype=torch.int64), cache)
        with pytest.raises(WorkhorseError, match="a cache of 4 tokens has no room for 1 more"):
            last_logits(backend, torch.tensor([[5]]), cache)


def test_angles_that_depend_on_the_length_are_refused() -> None:
    rope = {
        "kind": "rope",
        "scaling": {"kind": "dynamic_ntk", "factor": 2.0, "original_max_seq_len": 8},
    }
    config = LOCAL_AND_GLOBAL.to_dict()
    for block in config["blocks"].values():
        block["attention"]["position"] = rope
    decoder = DecoderConfig.from_dict(config).build()
    with pytest.raises(WorkhorseError, match="cannot be compiled"):
        CompiledStep(decoder)


def test_mixtures_are_refused() -> None:
    config = LOCAL_AND_GLOBAL.to_dict()
    for block in config["blocks"].values():
        block["feed_forward"] = {"kind": "moe", "d_ff": 16, "n_experts": 4, "top_k": 2}
    decoder = DecoderConfig.from_dict(config).build()
    with pytest.raises(WorkhorseError, match="a mixture of experts changes its tensor shapes"):
        CompiledStep(decoder)


def test_without_a_compiler_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("No working C++ compiler found\nand a long story")

    monkeypatch.setattr(torch, "compile", fail)
    backend = compiled(make(), tmp_path)
    with pytest.raises(WorkhorseError, match=r"model \(No working C\+\+ compiler found\); choose"):
        texts(backend, 1, 3)
