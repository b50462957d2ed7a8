"""Models that do not fit into memory raise an error before anything is read or built."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import workhorse
from workhorse.checkpoints.stored import open_stored
from workhorse.errors import WorkhorseError
from workhorse.memory.model_memory import check_stored
from workhorse.model.convert import convert


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the free memory in GiB."""

    def set_free(gib: float) -> None:
        monkeypatch.setattr(
            "workhorse.devices.memory.free_memory", lambda *_, **__: int(gib * 2**30)
        )

    return set_free


def test_a_preset_that_does_not_fit_is_refused_before_it_is_made(free) -> None:
    free(24)
    line = (
        r"llama-7b with its weights in float32 needs 25\.1 GiB and 24\.0 GiB are free on cpu; "
        r"choose a narrower dtype \(bfloat16\), or a smaller model"
    )
    with pytest.raises(WorkhorseError, match=line):
        workhorse.load("llama-7b", device="cpu", notify=list)
    free(1e-3)
    with pytest.raises(WorkhorseError, match=r"in bfloat16 needs 237\.\d MiB and 1\.0 MiB"):
        workhorse.load("gpt2", device="cpu", dtype="bfloat16", notify=list)


def test_what_is_copied_of_a_directory_must_fit_and_what_is_mapped_need_not(
    run_folder: Path, tmp_path: Path, free
) -> None:
    pytest.importorskip("gguf")
    convert(run_folder, tmp_path / "half", "hf", dtype="bfloat16")
    convert(run_folder, tmp_path / "m.gguf", "gguf", dtype="bfloat16", notify=list)
    free(0)
    with pytest.raises(WorkhorseError, match="run with its weights in float32 needs"):
        workhorse.load(run_folder, device="cpu")
    with pytest.raises(WorkhorseError, match="half with its weights in float32 needs"):
        workhorse.load(tmp_path / "half", device="cpu", dtype="float32")
    assert workhorse.load(tmp_path / "half", device="cpu").decoder.config.n_layers == 1
    stored = open_stored(tmp_path / "half")
    with pytest.raises(WorkhorseError, match="half, quantised, needs"):
        check_stored(stored, torch.device("cpu"), None, codes_per_byte=2)
    with pytest.raises(WorkhorseError, match=r"m\.gguf with its weights in float32 needs"):
        workhorse.load(tmp_path / "m.gguf", device="cpu", dtype="float32")


def test_a_gguf_file_must_fit(run_folder: Path, tmp_path: Path, free) -> None:
    pytest.importorskip("gguf")
    convert(run_folder, tmp_path / "m.gguf", "gguf", dtype="q8_0", notify=list)
    free(0)
    with pytest.raises(WorkhorseError, match=r"m\.gguf with its weights in float32 needs"):
        workhorse.load(tmp_path / "m.gguf", device="cpu")
