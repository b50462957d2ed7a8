"""How much of each type the weight files of a stored model hold, by their headers."""

import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from workhorse.checkpoints.gguf.read import DTYPES, GgufFile
from workhorse.checkpoints.run_directory import RunDirectory
from workhorse.checkpoints.stored import StoredModel
from workhorse.checkpoints.tensor_folder import TensorFolder
from workhorse.devices import dtype_name


class Held(NamedTuple):
    """What is stored of one type."""

    numbers: int
    bytes: int


def weight_files(stored: StoredModel) -> list[Path]:
    """The files with the weights; of a run, those of its newest checkpoint. There may be none."""
    if isinstance(stored, GgufFile):
        return [stored.path]
    # A link to nothing or to itself is told by what reads it.
    return sorted(file for file in _folder(stored).glob("*.safetensors") if file.is_file())


def weights_on_disk(stored: StoredModel) -> dict[str, Held]:
    """Numbers and bytes of each type, by its name, the most bytes first.

    Raises:
        WorkhorseError: a header is damaged.
    """
    found: dict[str, Held] = defaultdict(lambda: Held(0, 0))
    for kind, numbers, size in _tensors(stored):
        found[kind] = Held(found[kind].numbers + numbers, found[kind].bytes + size)
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))


def _tensors(stored: StoredModel) -> list[tuple[str, int, int]]:
    if isinstance(stored, GgufFile):
        return [
            (_gguf_name(one.kind), math.prod(one.shape), one.end - one.begin)
            for one in stored.tensors
        ]
    folder = TensorFolder(_folder(stored))
    found: list[tuple[str, int, int]] = []
    for name, dtype in folder.dtypes.items():
        numbers = math.prod(folder.shapes[name])
        found.append((dtype_name(dtype), numbers, numbers * dtype.itemsize))
    return found


def _gguf_name(kind: str) -> str:
    return dtype_name(DTYPES[kind]) if kind in DTYPES else kind.lower()


def _folder(stored: StoredModel) -> Path:
    if not isinstance(stored, RunDirectory):
        return stored.path
    store = stored.store()
    return store.path(next(iter(store.steps()), 0))
