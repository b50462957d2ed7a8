"""The common interface of models on disk in any format."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from workhorse.checkpoints.adapted import AdapterConfig, Base, copy_adapter, hash_of
from workhorse.checkpoints.gguf.read import GgufFile
from workhorse.checkpoints.huggingface.export import find_family
from workhorse.checkpoints.huggingface.load import (
    ADAPTER_FILE,
    HuggingFaceDirectory,
    resolve_model,
)
from workhorse.checkpoints.model_folder import ModelFolder
from workhorse.checkpoints.peft import add_peft
from workhorse.checkpoints.runs.run_directory import RunDirectory
from workhorse.checkpoints.tensors import (
    Places,
    empty_decoder,
    load_weights,
    mapped_weights,
    weights_of,
    with_rows,
)
from workhorse.devices.transfer import copy_tensors
from workhorse.errors import WorkhorseError, nearest, shown
from workhorse.files.text_formats import to_path
from workhorse.models import preset_names
from workhorse.models.huggingface import Family
from workhorse.models.systems import near_system
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import KernelName
from workhorse.transforms.record import transforms_of

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
    return TrainedModel.at(path)


def open_base(
    init: str, config: DecoderConfig, sha256: str | None = None, new: range = range(0)
) -> tuple[Base, dict[str, Tensor]]:
    """Open the model that an adapter is added to; return its weights, mapped from the files.

    Args:
        init: a folder, a file or an id of the hub.
        config: the config of the decoder that gets the adapter. Only options without weights, such
            as dropout, may differ, and it may have more tokens.
        sha256: the hash of the weights that an existing adapter was trained on.
        new: ids of the tokens that the model does not have; see `grown`.

    Raises:
        WorkhorseError: there is no such model, it has an adapter itself, or it has other weights.
    """
    try:
        decoder = open_stored(init).load_decoder(places=mapped_weights)
    except WorkhorseError as error:
        raise WorkhorseError(f"the base of the adapter cannot be loaded: {error}") from None
    if transforms_of(decoder):
        raise WorkhorseError(
            f"init={init} is a run of an adapter and cannot be the base of another; give its base"
        )
    stored = weights_of(decoder)
    rows = max(config.vocab_size, decoder.config.vocab_size)
    weights = with_rows(stored, rows, new)
    shapes = {name: weight.shape for name, weight in weights.items()}
    expected = config.build(device="meta").named_parameters()
    if shapes != {name: weight.shape for name, weight in expected}:
        raise WorkhorseError(f"init={init} has weights of other shapes than the adapter's base")
    path = os.path.abspath(init) if os.path.exists(init) else init
    base = Base(path, hash_of(stored))
    if sha256 not in (None, base.sha256):
        raise WorkhorseError(
            f"the weights of {path} (SHA-256 {base.sha256[:16]}) are not those that the adapter "
            f"was trained on ({sha256[:16]}); restore them"
        )
    return base, weights


def _load_adapted(
    decoder: Decoder, state: Mapping[str, Any], weights: Mapping[str, Tensor], places: Places
) -> None:
    """Load the base and the adapter of a run's checkpoint into a decoder without values, in place.

    If `places` does not quantise the weights of the base, they get the format of the training.
    """
    adapter = AdapterConfig.from_dict(state["recipe"]["adapter"])
    _, base = open_base(state["base"]["init"], decoder.config, state["base"]["sha256"])
    into = places(decoder)
    if adapter.quantize is not None and not transforms_of(decoder):
        into = adapter.place_codes(decoder)
    copy_tensors(into, base, "base")
    adapter.adapt(decoder, seed=0)
    copy_adapter(decoder, weights)


class TrainedModel(RunDirectory):
    """The model that a run trained, in the run's directory."""

    kind = "run directory"
    family = None
    dtype = torch.float32
    stop_tokens: tuple[int, ...] = ()
    """Ids of the tokens that end generation. Always empty: the tokenizer's eos is used instead."""

    def load_decoder(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        kernel: KernelName = "auto",
        places: Places = weights_of,
    ) -> Decoder:
        """Build the trained decoder and load its weights; see `StoredModel.load_decoder`.

        If the run trained an adapter, its base is loaded too, and the decoder has the adapter.

        Raises:
            WorkhorseError: the run or checkpoint is missing, the checkpoint's config differs from
                `config.json`, or the base of an adapter is missing or has changed.
        """
        config = self.config
        weights, state = self.weights()
        if DecoderConfig.from_dict(state["config"]) != config:
            raise WorkhorseError(
                f"the checkpoints in {self.path} were trained with another config than its "
                f"{self.config_file.name}; restore the original file"
            )
        decoder = empty_decoder(config, kernel, device, dtype or self.dtype)
        if "base" in state:
            _load_adapted(decoder, state, weights, places)
        else:
            load_weights(decoder, weights, places)
        return decoder.eval()

    def add_adapter(self, decoder: Decoder, init: str, name: str) -> None:
        """Add the adapter that this run trained to its base, in place.

        Args:
            decoder: the base, which may have another dtype than in the run.
            init: the model that the decoder was loaded from.
            name: the name that the adapter gets.

        Raises:
            WorkhorseError: the run has no adapter, or the decoder is not its base.
        """
        weights, state = self.weights()
        if "base" not in state:
            raise WorkhorseError(
                "the run trained a whole model, not an adapter; give it as the model"
            )
        if self.config.vocab_size > decoder.config.vocab_size:
            raise WorkhorseError(
                f"the run added tokens to the {decoder.config.vocab_size:,} of its base; give the "
                "run as the model, without an adapter"
            )
        open_base(init, decoder.config, state["base"]["sha256"])
        AdapterConfig.from_dict(state["recipe"]["adapter"]).adapt(decoder, seed=0, name=name)
        copy_adapter(decoder, weights, name)


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
    if (adapter / ADAPTER_FILE).exists():
        add_peft(decoder, adapter, model.family or find_family(model.config), name=name)
        return
    run = trained_adapter(adapter)
    try:
        run.add_adapter(decoder, str(model.path), name)
    except WorkhorseError as error:
        raise WorkhorseError(f"{adapter}: {error}") from None


def trained_adapter(adapter: Path) -> TrainedModel:
    """Return the run that trained an adapter.

    Raises:
        WorkhorseError: the path is not a run.
    """
    run = TrainedModel.at(adapter)
    if not run.exists:
        raise WorkhorseError(
            f"{adapter} is not an adapter: neither {ADAPTER_FILE} nor {run.recipe_file.name} "
            "exists; give a PEFT directory or a run"
        )
    return run
