"""`convert`: write a model in another format; `save`: write a decoder that you have trained."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import nn

from workhorse.checkpoints.huggingface.export import find_family, write_huggingface
from workhorse.checkpoints.model_folder import check_new, write_model
from workhorse.checkpoints.peft import write_peft
from workhorse.checkpoints.runs.run_directory import RunDirectory
from workhorse.checkpoints.stored import is_stored, model_name, open_stored
from workhorse.config.arguments import check_choice, token_ids
from workhorse.devices.names import dtype_name
from workhorse.errors import WorkhorseError, shown, warn_caller
from workhorse.files.text_formats import to_path
from workhorse.model.load import check_callback, load
from workhorse.model.model import Model
from workhorse.models import preset, preset_names
from workhorse.models.describe import count_parameters
from workhorse.models.huggingface import Family
from workhorse.nn import Decoder, DecoderConfig
from workhorse.tokenizers import Tokenizer
from workhorse.transforms.adapters import adapted_layers, adapters_of
from workhorse.transforms.grouped_heads import group_heads, grouped
from workhorse.transforms.record import check_weights_kept, is_body, transforms_of

if TYPE_CHECKING:
    from workhorse.checkpoints.gguf import GgufType

Format = Literal["hf", "workhorse", "gguf", "peft", "gguf-lora"]
ADAPTERS, GGUF = ("peft", "gguf-lora"), ("gguf", "gguf-lora")
"""Formats of adapters, and formats of files."""
DTypeName = Literal["auto", "float32", "bfloat16", "float16", "q8_0", "q4_0", "q4_k"]
QUANTIZED = ("q8_0", "q4_0", "q4_k")
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""The GGUF name of each dtype that is not quantised."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    path: Path
    format: Format
    architecture: str | None
    """The class of Hugging Face transformers that can load the written model; None for Workhorse's
    own format."""
    dtype: str
    parameters: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def convert(
    source: str | Path | Model,
    target: str | Path,
    to: Format,
    *,
    dtype: DTypeName = "auto",
    n_kv_heads: int | None = None,
    adapter: str | Path | None = None,
    tokenizer: bool = True,
    notify: Callable[[str], object] = warn_caller,
) -> Converted:
    """Write a model in another format, with its adapter merged, or only its adapter.

    Args:
        source: a loaded model, or the path, hub id or preset name of one; see `load`.
        target: a new or empty folder; for `gguf` and `gguf-lora`, a new file.
        to: `hf` (a Hugging Face directory), `workhorse` (Workhorse's own format, for any config) or
            `gguf`; or only the adapter: `peft` (a PEFT directory) or `gguf-lora` (a file for
            llama.cpp).
        dtype: dtype of the written weights; `auto` keeps the source's dtype. `q8_0`, `q4_0` and
            `q4_k` are only for `gguf`.
        n_kv_heads: number of key-value heads per layer in the written model, each the mean of
            adjacent heads of the source; None keeps all heads.
        adapter: an adapter of the source; see `load`. Other formats than `peft` and `gguf-lora` get
            weights to which it is added in float32.
        tokenizer: False to write the model without its tokenizer.
        notify: see `load`.

    Raises:
        WorkhorseError: the source cannot be read, the format cannot represent the model, its heads
            cannot be merged into `n_kv_heads`, a weight is NaN or does not fit `dtype`, or the
            target exists.
    """
    target = to_path(target, "a target is a path")
    check_choice("to", to, get_args(Format))
    check_choice("dtype", dtype, get_args(DTypeName))
    if dtype in QUANTIZED and to != "gguf":
        raise WorkhorseError(f"dtype={dtype} needs --to gguf, not {to}; choose another dtype")
    check_callback(notify)
    _check_target(target, to)
    if to in ADAPTERS:
        if dtype != "auto" or n_kv_heads is not None or not tokenizer:
            raise WorkhorseError(
                f"--to {to} writes the adapter as it is; remove dtype, n_kv_heads, no-tokenizer"
            )
        return _convert_adapter(source, target, to, adapter, notify)
    # Find the model type before the weights are read, so that an unsupported config fails early.
    family = None if to == "workhorse" else _family(source, to, n_kv_heads)
    model, own_dtype = _load(source, dtype, adapter, notify)
    model = model if tokenizer else replace(model, tokenizer=None)
    if adapters_of(model.reference):
        model = model.merged()
    if n_kv_heads is not None:
        grouped = group_heads(model.reference, n_kv_heads)
        model = replace(model, reference=grouped, executed=None, family=family)
    decoder = model.decoder
    _check_weights(decoder)
    name = dtype_name(own_dtype) if dtype == "auto" else dtype
    if family is not None and to == "gguf":
        _write_gguf(target, model, family, name, notify)
    else:
        write = write_model if family is None else partial(write_huggingface, family=family)
        write(
            target,
            decoder,
            tokenizer=whole_tokenizer(model),
            dtype=getattr(torch, name),
            stop_tokens=model.stop_tokens,
        )
    # The written model may have more weights: norms without weights are written with ones.
    equivalent = family.equivalent(decoder.config) if family else None
    parameters = count_parameters(equivalent or decoder.config)["total"]
    return Converted(target, to, family.architecture if family else None, name, parameters)


def _check_target(target: Path, to: Format) -> None:
    """Raise a WorkhorseError if the target exists, is in a run, or is a folder named `*.gguf`."""
    if any(RunDirectory(folder).keeps(target) for folder in target.absolute().parents):
        raise WorkhorseError(f"{target} is inside a run directory; choose a path outside it")
    if to in GGUF:
        from workhorse.checkpoints.gguf.quantized import gguf_package

        gguf_package("writing GGUF")  # before weights are read
        if os.path.lexists(target):
            raise WorkhorseError(f"{target} exists; choose another file")
    if to not in GGUF:
        if target.suffix == ".gguf":
            raise WorkhorseError(
                f"{target} ends in .gguf, but --to {to} writes a folder; "
                "choose a name without .gguf"
            )
        check_new(target)


def save(
    decoder: Decoder | Model,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    stop_tokens: Sequence[int] = (),
) -> Path:
    """Write a decoder to a folder that `load` can read, for example after your own training loop.

    Args:
        decoder: the decoder to write, in the dtype of its weights. A `Model` is written with its
            tokenizer and stop tokens.
        folder: a new or empty folder. If writing fails, no incomplete folder is left.
        tokenizer: the decoder's tokenizer. Without one, the loaded model works on token ids only.
        stop_tokens: token ids that end a completion, if not the tokenizer's eos.

    Raises:
        WorkhorseError: the folder is not empty or cannot be written, weights are quantised, NaN or
            on the device `meta`, or the tokenizer has more tokens than the decoder.
    """
    if isinstance(decoder, Model):
        tokenizer = tokenizer or whole_tokenizer(decoder)
        stop_tokens, decoder = stop_tokens or decoder.stop_tokens, decoder.decoder
    if not isinstance(decoder, Decoder):
        raise WorkhorseError(
            f"save needs a Decoder or a Model, not a {type(decoder).__name__}; pass the "
            "Decoder itself"
        )
    _check_weights(decoder)
    folder = to_path(folder, "a folder is a path")
    stop = token_ids(stop_tokens, "stop_tokens are a sequence of token ids", "omit them")
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise WorkhorseError(f"{shown(tokenizer)} is not a Tokenizer; give one from load_tokenizer")
    vocabulary = decoder.config.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > vocabulary:
        raise WorkhorseError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the decoder has logits for only "
            f"{vocabulary}; give the tokenizer that the decoder was trained with"
        )
    if strange := [token for token in stop if not 0 <= token < vocabulary]:
        raise WorkhorseError(
            f"stop_tokens={strange} are not in the vocabulary of {vocabulary} tokens; remove them"
        )
    write_model(folder, decoder, tokenizer=tokenizer, stop_tokens=tuple(stop))
    return folder


def _check_weights(decoder: Decoder) -> None:
    """Raise a WorkhorseError if a decoder has no weights, or if its modules were changed."""
    if decoder.device.type == "meta":
        raise WorkhorseError(
            "the decoder is on the device meta and has no weights; load or initialise them"
        )
    check_weights_kept(decoder)
    _check_modules(decoder)


def _check_modules(decoder: Decoder) -> None:
    """Check that `load` can build a decoder with the same modules from its config."""
    built = dict(decoder.config.build(device="meta").named_modules())
    found = dict(decoder.named_modules())
    for name in [*built, *(name for name in found if name not in built)]:
        own, expected = found.get(name), built.get(name)
        if own is not None and expected is not None and _is_built(own, expected):
            continue
        is_own = own is not None and type(own).__module__.startswith("workhorse.")
        if ".kernel." in name:  # parts of the attention kernel, which is not saved
            continue
        if is_own and (name.endswith(".kernel") or transforms_of(decoder) or is_body(decoder)):
            continue
        there, wanted = (
            "nothing" if module is None else type(module).__name__ for module in (own, expected)
        )
        raise WorkhorseError(
            f"{name} is {there}, but the config builds {wanted}, so load would return a different "
            "model; merge your changes into the weights, or save the state_dict yourself"
        )


def _is_built(own: nn.Module, expected: nn.Module) -> bool:
    if type(own) is type(expected):
        ours = type(own).__module__.startswith("workhorse.")  # may differ in the kernel it names
        return ours or own.extra_repr() == expected.extra_repr()
    return isinstance(own, type(expected)) and type(own).__module__.startswith("workhorse.")


def _write_gguf(
    target: Path, model: Model, family: Family, dtype: str, notify: Callable[[str], object]
) -> None:
    from workhorse.checkpoints.gguf import write_gguf

    notes = write_gguf(
        target,
        model.decoder,
        model_type=family.model_type,
        tokenizer=whole_tokenizer(model),
        dtype=cast("GgufType", GGUF_TYPES.get(dtype, dtype)),
        name=Path(model.name).name,
        stop_tokens=model.stop_tokens,
    )
    for note in notes:
        notify(note)


def _family(source: str | Path | Model, to: Format, n_kv_heads: int | None) -> Family:
    """The model type (family of architectures) to write a model as."""
    own, config = _origin(source)
    if n_kv_heads is not None:
        config = grouped(config, n_kv_heads)
        own = own if own and own.difference(config) is None else None
    if to == "hf":
        return own or find_family(config)
    from workhorse.checkpoints.gguf import find_gguf_family

    return find_gguf_family(config, own)


def _origin(source: str | Path | Model) -> tuple[Family | None, DecoderConfig]:
    """The model type in which a model is stored (None for a preset), and its config."""
    if isinstance(source, Model):
        return source.family, source.config
    name = model_name(source)
    if not is_stored(name) and name in preset_names():
        return None, preset(name)
    stored = open_stored(source)
    return stored.family, stored.config


def _load(
    source: str | Path | Model,
    dtype: DTypeName,
    adapter: str | Path | None,
    notify: Callable[[str], object],
) -> tuple[Model, torch.dtype]:
    """Load a model with its adapter, and return it with the dtype that its weights are stored in.

    Weights that change before they are written (quantised, or with an adapter) are rounded once.
    """
    if isinstance(source, Model):
        if adapter is not None:
            raise WorkhorseError("adapter needs the path of its base; give the path as the source")
        return source, source.decoder.embedding.tokens.weight.dtype
    held = "auto" if dtype in QUANTIZED else dtype
    if adapter is not None or (is_stored(str(source)) and _adapted_base(source)):
        held = "float32"
    model = load(
        source,
        device="cpu",
        dtype=held,
        adapter=adapter,
        execution="reference",
        notify=notify,
    )
    if adapter is not None:
        return model, open_stored(source).dtype
    return model, model.decoder.embedding.tokens.weight.dtype


def _adapted_base(source: str | Path) -> str | None:
    """The base of a run that trained an adapter; None for other models."""
    stored = open_stored(source)
    return stored.base if isinstance(stored, RunDirectory) else None


def _convert_adapter(
    source: str | Path | Model,
    target: Path,
    to: Format,
    adapter: str | Path | None,
    notify: Callable[[str], object],
) -> Converted:
    """Write the active adapter of a model."""
    model, _ = _load(source, "auto", adapter, notify)
    decoder = model.reference
    active = {one.active for one in adapted_layers(decoder).values() if one.active is not None}
    if not active:
        raise WorkhorseError(f"{model.name} has no adapter; give one with adapter (--adapter)")
    (name,) = active
    base = _adapted_base(model.name) or (model.name if isinstance(source, Model) else str(source))
    stored = open_stored(base)
    family = stored.family or find_family(decoder.config)
    if stored.family is None:
        notify(f"other programs cannot load the base {base}; convert it too, with --to hf or gguf")
    if to == "peft":
        tokenizer = whole_tokenizer(model)
        count = write_peft(target, decoder, family, base, name=name, tokenizer=tokenizer)
    else:
        from workhorse.checkpoints.gguf import write_gguf_adapter

        count = write_gguf_adapter(target, decoder, family, name=name)
    return Converted(target, to, family.architecture, "float32", count)


def whole_tokenizer(model: Model) -> Tokenizer | None:
    """The tokenizer, with the token that preceded documents in training as bos.

    Other programs put bos before a prompt.
    """
    tokenizer = model.tokenizer
    if tokenizer is None or model.data is None:
        return tokenizer
    names = {index: token for token, index in tokenizer.special_tokens.items()}
    if tuple(tokenizer.prefix_ids) != model.prefix:
        tokenizer = tokenizer.with_prefix(*(names[index] for index in model.prefix))
    if model.start is None or model.start == tokenizer.bos_id:
        return tokenizer
    return tokenizer.with_role("bos", names[model.start])
