"""Sizes of models and adapters on disk, from the headers of their files."""

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from workhorse.checkpoints.gguf.read import UNQUANTIZED, GgufFile
from workhorse.checkpoints.huggingface.load import ADAPTER_FILE
from workhorse.checkpoints.huggingface.tensor_folder import TensorFolder
from workhorse.checkpoints.peft import WEIGHTS
from workhorse.checkpoints.runs.run_directory import RunDirectory
from workhorse.checkpoints.stored import StoredModel, trained_adapter
from workhorse.devices.names import dtype_name

Found = TypeVar("Found")


class WeightSize(NamedTuple):
    """Number of elements and bytes of the stored weights of one dtype."""

    numbers: int
    bytes: int


def bytes_on_disk(stored: StoredModel) -> int:
    """Total bytes of a model's weight files; for a run, of its newest checkpoint; 0 if none."""
    if isinstance(stored, GgufFile):
        return stored.path.stat().st_size
    return _in_folder(stored, _bytes) or 0


def weights_on_disk(stored: StoredModel) -> dict[str, WeightSize]:
    """Sum up a model's weight files: elements and bytes by dtype name, the most bytes first.

    The result is empty if there are no weights.

    Raises:
        WorkhorseError: a header is damaged.
    """
    found: dict[str, WeightSize] = defaultdict(lambda: WeightSize(0, 0))
    for kind, numbers, size in _tensors(stored):
        found[kind] = WeightSize(found[kind].numbers + numbers, found[kind].bytes + size)
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))


def _tensors(stored: StoredModel) -> list[tuple[str, int, int]]:
    """Dtype, number of elements and bytes of each tensor."""
    if isinstance(stored, GgufFile):
        return [
            (_gguf_name(one.kind), math.prod(one.shape), one.end - one.begin)
            for one in stored.tensors
        ]
    return _in_folder(stored, _headers) or []


def _headers(path: Path) -> list[tuple[str, int, int]]:
    if not _files(path):
        return []
    folder = TensorFolder(path)
    found: list[tuple[str, int, int]] = []
    for name, dtype in folder.dtypes.items():
        numbers = math.prod(folder.shapes[name])
        found.append((dtype_name(dtype), numbers, numbers * dtype.itemsize))
    return found


def _gguf_name(kind: str) -> str:
    return dtype_name(UNQUANTIZED[kind]) if kind in UNQUANTIZED else kind.lower()


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in _files(folder))


def _files(folder: Path) -> list[Path]:
    # A dangling or circular link is reported when the file is read.
    return [file for file in folder.glob("*.safetensors") if file.is_file()]


def _in_folder(stored: StoredModel, read: Callable[[Path], Found]) -> Found | None:
    """Return `read(folder)` for the folder of the weights; None for a run without checkpoint."""
    if not isinstance(stored, RunDirectory):
        return read(stored.path)
    store = stored.store()
    return store.newest_folder(read) if stored.step is None else read(store.path(stored.step))


def elements_of_adapter(adapter: Path) -> int:
    """Number of elements of the weights of an adapter on disk.

    Raises:
        WorkhorseError: there is no adapter, or a header is damaged.
    """
    if (adapter / ADAPTER_FILE).exists():
        return sum(map(math.prod, TensorFolder(adapter, WEIGHTS).shapes.values()))
    return sum(held.numbers for held in weights_on_disk(trained_adapter(adapter)).values())
