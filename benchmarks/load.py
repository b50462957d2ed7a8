"""Loading models in bfloat16: seconds beside peers, and peak memory.

    python -m benchmarks.load

Every round is a new process with its packages imported. The time ends when one byte of every page
of every weight has been read, because mapping a file reads nothing. For `cached`, the file is in
the system's page cache. For `dropped`, it is removed from the cache first, if the system allows it.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.command import main, parser, with_models
from benchmarks.harness.contest import Case, Limit
from benchmarks.harness.shapes import STORED, Shape
from benchmarks.harness.worker import Contestant, MissingError, Round

if TYPE_CHECKING:
    from torch import Tensor

PAGE = 4096


def workhorse(shape: str, models: str, cached: bool, threads: int) -> Round:
    """Rounds of `workhorse.load`."""
    from workhorse import load

    def weights(folder: Path) -> Iterable["Tensor"]:
        model = load(folder, dtype="bfloat16", notify=lambda _line: None)
        return model.decoder.parameters()

    return _rounds(weights, shape, models, cached, threads)


def transformers(shape: str, models: str, cached: bool, threads: int) -> Round:
    """Rounds of `from_pretrained`."""
    import torch
    from transformers import GPT2LMHeadModel, LlamaForCausalLM

    # By class, so that its module is imported before timing: the Auto class imports it on loading.
    kind = LlamaForCausalLM if STORED[shape].gated else GPT2LMHeadModel

    def weights(folder: Path) -> Iterable["Tensor"]:
        model = kind.from_pretrained(folder, dtype=torch.bfloat16)
        return model.parameters()

    return _rounds(weights, shape, models, cached, threads)


def safetensors(shape: str, models: str, cached: bool, threads: int) -> Round:
    """Rounds of `load_file`, which returns tensors, not a model."""
    from safetensors.torch import load_file

    def weights(folder: Path) -> Iterable["Tensor"]:
        return load_file(folder / "model.safetensors").values()

    return _rounds(weights, shape, models, cached, threads)


def _rounds(
    weights: Callable[[Path], Iterable["Tensor"]],
    shape: str,
    models: str,
    cached: bool,
    threads: int,
) -> Round:
    import torch

    from benchmarks.harness.models import huggingface_folder

    torch.set_num_threads(threads)
    folder = huggingface_folder(shape, models)
    files = list(folder.glob("*.safetensors"))

    def take() -> dict[str, float]:
        for file in files:
            _read(file) if cached else _drop(file)
        started = time.perf_counter()
        for weight in weights(folder):
            weight.detach().view(-1)[:: PAGE // weight.itemsize].sum().item()
        return {"seconds": time.perf_counter() - started}

    return take


def _read(file: Path) -> None:
    with file.open("rb", buffering=0) as opened:
        while opened.read(1 << 24):
            pass


def _drop(file: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        raise MissingError("this system does not let a program drop its page cache")
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def copied(shape: str, models: str, cached: bool, threads: int) -> Round:
    """The limit, `gbytes`: reading the file into memory that is already allocated, in GB/s."""
    from benchmarks.harness.models import huggingface_folder

    del threads
    files = list(huggingface_folder(shape, models).glob("*.safetensors"))
    room = bytearray(max(file.stat().st_size for file in files))

    def take() -> dict[str, float]:
        for file in files:
            _read(file) if cached else _drop(file)
        started, size = time.perf_counter(), 0
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while got := opened.readinto(memoryview(room)[: 1 << 26]):
                    size += got
        return {"gbytes": size / (time.perf_counter() - started) / 1e9}

    return take


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """All shapes with the file in the page cache, and one shape without."""
    for shape in STORED.values():
        yield _case(shape, options, cached=True)
    yield _case(STORED["350m"], options, cached=False)


def _case(shape: Shape, options: argparse.Namespace, *, cached: bool) -> Case:
    same = {"shape": shape.name, "models": str(options.models), "cached": cached}
    contestants = (
        Contestant("Workhorse", "benchmarks.load:workhorse", same),
        Contestant("transformers", "benchmarks.load:transformers", same),
        Contestant("safetensors", "benchmarks.load:safetensors", same, "tensors, no model"),
    )
    weights = shape.product_weights + shape.vocab_size * shape.d_model * shape.gated  # or tied
    limit = Limit(
        "reading the file",
        "GB/s",
        Contestant("reading the file", "benchmarks.load:copied", same),
        measure="gbytes",
        work=weights * 2 / 1e9,
    )
    name = f"{shape.name} {'cached' if cached else 'dropped'}"
    return Case(name, "seconds", "s", contestants, limit, fresh=True)


def options() -> argparse.ArgumentParser:
    """The command-line parser."""
    return with_models(parser(__doc__ or ""))


if __name__ == "__main__":
    main("load", cases, options().parse_args())
