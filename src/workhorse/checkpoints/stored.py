"""The common interface of models on disk in any format, and their sizes by dtype."""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch

from workhorse.checkpoints.gguf.read import UNQUANTIZED, GgufFile
from workhorse.checkpoints.huggingface.export import find_family
from workhorse.checkpoints.huggingface.load import ADAPTER_FILE, HuggingFaceDirectory
from workhorse.checkpoints.huggingface.tensor_folder import TensorFolder
from workhorse.checkpoints.model_folder import ModelFolder
from workhorse.checkpoints.runs.run_directory import RunDirectory
from workhorse.checkpoints.tensors import Places, weights_of
from workhorse.devices.names import dtype_name
from workhorse.errors import WorkhorseError, nearest, shown
from workhorse.files.text_formats import to_path
from workhorse.models import preset_names
from workhorse.models.huggingface import Family
from workhorse.models.systems import near_system
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import KernelName

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer

FILES = (".gguf", ".safetensors", ".json")
"""File name suffixes by which the name of a model is recognised as a file."""


class StoredModel(Protocol):
    """A model on disk."""

    path: Path

    @property
    def kind(self) -> str:
        """Description of the format, for messages."""
        ...

    @property
    def family(self) -> Family | None:
        """The equivalent Hugging Face model type, or None."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The default dtype of the loaded weights."""
        ...

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def remarks(self) -> Sequence[str]:
        """Warnings for the user, one line each; loading may add to them."""
        ...

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that end generation; if empty, the tokenizer's eos."""
        ...

    def load_decoder(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        kernel: KernelName = "auto",
        places: Places = weights_of,
    ) -> Decoder:
        """Build the decoder and load its weights, in evaluation mode.

        The weights get the dtype `self.dtype` by default. The function `places` returns the
        destinations that they are copied to.
        """
        ...

    @property
    def has_tokenizer(self) -> bool: ...

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer."""
        ...

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer that the model was trained with."""
        ...


def open_stored(
    model: str | Path,
    notify: Callable[[str], object] = lambda line: None,
    *,
    weights: bool = True,
) -> StoredModel:
    """Open a model by its folder or file, or by its id on the Hugging Face hub.

    Args:
        model: a run directory or one of its checkpoints, a folder written by `convert`, a Hugging
            Face directory, a GGUF file, or `ORG/NAME` or `ORG/NAME@REVISION` on the hub. A model on
            the hub is downloaded if it is not in the cache.
        notify: called with a message that names the commit of a model on the hub.
        weights: True to download the weights of a model on the hub.

    Raises:
        WorkhorseError: there is no such model, or it cannot be read.
    """
    path = Path(model_name(model))
    if not os.path.exists(path):
        if str(model) in preset_names():
            raise WorkhorseError(
                f"{model} is a preset, which has no weights; give a folder or hub id (to train a "
                f"model of this shape, set 'model={{preset: {model}}}' in a recipe)"
            )
        if not is_hub_id(str(model)):
            raise WorkhorseError(f"{model} does not exist; check the path")
        from workhorse.checkpoints.huggingface.load import resolve_model

        try:
            path = resolve_model(str(model), weights=weights, notify=notify)
        except WorkhorseError as error:
            raise WorkhorseError(f"there is no folder {model}; as a hub id: {error}") from None
    if GgufFile.is_one(path):
        return GgufFile(path)
    for kind in (ModelFolder, HuggingFaceDirectory):
        if path.is_dir() and kind.is_one(path):
            return kind(path)
    _check_may_be_run(path)
    return RunDirectory.at(path)


def _check_may_be_run(path: Path) -> None:
    """Raise an error if a path cannot be a run directory: a file, or the folder of an adapter."""
    if path.suffix in (".yaml", ".yml") and not path.is_dir():
        raise WorkhorseError(
            f"{path} is a recipe, not a model; train it with workhorse train {path} and give the "
            "run directory (--dry-run only shows the run)"
        )
    if not path.is_dir():
        raise WorkhorseError(f"{path} is a file; give the folder of its model")
    if (path / ADAPTER_FILE).exists():
        raise WorkhorseError(
            f"{path} is an adapter (LoRA), not a model; give its base as the model, and the "
            "adapter with --adapter"
        )


def model_name(model: object) -> str:
    """Return a model's path or name as a string.

    Raises:
        WorkhorseError: `model` is not a path or a string.
    """
    to_path(model, "a model is a path, a hub id or a preset's name")
    return str(model)  # a Path would drop the dot of ./name, which marks a folder


def is_stored(model: str) -> bool:
    """Return True if a name refers to a model on disk or on the hub, and not to a preset.

    The model need not exist: a slash or the suffix of a model file is enough.
    """
    return "/" in model or model.endswith(FILES) or os.path.exists(model)


def no_such_model(name: str) -> WorkhorseError:
    """Return the error for a name that is not a path, hub id or preset."""
    remedy = near_system(name) or nearest(name, preset_names())
    if remedy.startswith("known"):
        remedy = "check the path (workhorse models list shows the presets)"
    return WorkhorseError(f"there is no folder, hub id or preset {shown(name)}; {remedy}")


def is_hub_id(model: str) -> bool:
    """True if a name has the form of a hub id: two words separated by a slash.

    Names of model files, and paths in the folder `runs` or `~`, are never hub ids.
    """
    name = model.partition("@")[0]
    words = name.split("/")
    return (
        len(words) == 2  # noqa: PLR2004
        and all(word and not word.startswith(".") for word in words)
        and not name.endswith(FILES)
        and words[0] not in ("runs", "~")
    )


def add_stored_adapter(decoder: Decoder, model: StoredModel, adapter: Path, name: str) -> None:
    """Add an adapter on disk to a decoder, in place, and make it the active one.

    Args:
        decoder: the decoder of `model`.
        model: the base.
        adapter: a PEFT directory, or a run that trained an adapter.
        name: the name that the adapter gets.

    Raises:
        WorkhorseError: there is no adapter, it cannot be read, or it belongs to another base.
    """
    from workhorse.checkpoints.peft import add_peft

    if (adapter / ADAPTER_FILE).exists():
        add_peft(decoder, adapter, model.family or find_family(model.config), name=name)
        return
    run = _run_of(adapter)
    try:
        run.add_adapter(decoder, str(model.path), name)
    except WorkhorseError as error:
        raise WorkhorseError(f"{adapter}: {error}") from None


def elements_of_adapter(adapter: Path) -> int:
    """Number of elements of the weights of an adapter on disk.

    Raises:
        WorkhorseError: there is no adapter, or a header is damaged.
    """
    from workhorse.checkpoints.peft import WEIGHTS

    if (adapter / ADAPTER_FILE).exists():
        return sum(map(math.prod, TensorFolder(adapter, WEIGHTS).shapes.values()))
    return sum(held.numbers for held in weights_on_disk(_run_of(adapter)).values())


def _run_of(adapter: Path) -> RunDirectory:
    run = RunDirectory.at(adapter)
    if not run.exists:
        raise WorkhorseError(
            f"{adapter} is not an adapter: neither {ADAPTER_FILE} nor {run.recipe_file.name} "
            "exists; give a PEFT directory or a run"
        )
    return run


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
