"""Writes a decoder and its tokenizer as one GGUF file for llama.cpp."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from workhorse.checkpoints.gguf.architecture import WINDOW, Architecture, Data, put
from workhorse.checkpoints.gguf.architectures import ARCHITECTURES
from workhorse.checkpoints.gguf.metadata import OWN_CONFIG, model_metadata
from workhorse.checkpoints.gguf.quantized import gguf_package, quantize
from workhorse.checkpoints.gguf.tensors import TensorPlan, plan_tensors
from workhorse.checkpoints.gguf.vocabulary import NO_VOCABULARY, end_metadata, tokenizer_metadata
from workhorse.checkpoints.huggingface.export import to_equivalent
from workhorse.checkpoints.tensors import check_numbers
from workhorse.errors import WorkhorseError, nearest
from workhorse.files.gguf_file import BLOCKS
from workhorse.files.writing import replacing
from workhorse.models.huggingface import Family, in_the_way, native_class, nearest_of
from workhorse.models.huggingface import family as family_of
from workhorse.models.huggingface.family import look_up, plain
from workhorse.nn import Decoder, DecoderConfig

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer

APPROXIMATIONS: tuple[tuple[str, object, object, str], ...] = (
    (
        "feed_forward.activation",
        "gelu",
        "gelu_tanh",
        "llama.cpp computes GELU in its tanh form; logits differ in the fourth digit",
    ),
    (
        "attention.position.scaling.truncate",
        False,
        True,
        "llama.cpp rounds the ends of YaRN's ramp to whole pairs; angles differ a little",
    ),
    (
        "attention.position.scaling.kind",
        "longrope",
        "longrope",
        "llama.cpp chooses LongRoPE's factors by its context size, not by the sequence length",
    ),
)
"""Settings that llama.cpp only approximates: path, our value, llama.cpp's value, and a warning."""


def readable(config: DecoderConfig, *, windows: bool) -> tuple[Data, list[str]]:
    """Convert a config to plain data, with the values that llama.cpp uses as approximations.

    Also returns warnings about the approximations.

    Args:
        config: the decoder's config.
        windows: True if the architecture supports sliding windows. Otherwise windows are removed,
            and the context length is limited to the narrowest window, so that they have no effect.
    """
    data, remarks = plain(config), list[str]()
    layers: list[Data] = data["layers"]
    for path, ours, theirs, remark in APPROXIMATIONS:
        for layer in layers:
            if look_up(layer, path) == ours:
                put(layer, path, theirs)
                remarks += [remark] if remark not in remarks else []
    if not windows:
        narrowest = min(_windows(layers), default=data["max_seq_len"])
        if narrowest < data["max_seq_len"]:
            remarks.append(
                "llama.cpp has no sliding window for this architecture; the context is cut to "
                f"{narrowest} tokens, so that the window has no effect"
            )
        data["max_seq_len"] = min(narrowest, data["max_seq_len"])
        for layer in layers:
            put(layer, WINDOW, None)
    return data, remarks


def _windows(layers: Iterable[Data]) -> list[int]:
    found: list[Any] = [look_up(layer, WINDOW) for layer in layers]
    return [window for window in found if isinstance(window, int)]


GgufType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k"]
FILE_TYPES: dict[str, int] = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q4_k": 14, "bf16": 32}
"""llama.cpp's `general.file_type`, by the type of most weights."""
SMALLER = {"q4_k": ("q4_k", "q5_0"), "q4_0": ("q4_0",), "q8_0": ("q8_0",)}
"""Types to try for a matrix, by requested type.

As in llama.cpp, the first type with a block size that divides the row length is used.
"""
FINE = ("output.weight", "token_embd.weight", "position_embd.weight")
"""Matrices in which 4 bits would cause the largest errors. They are stored with 8 bits instead."""
PRECISE = ("_norm.weight", ".bias", "ffn_gate_inp.weight")
"""Name endings of tensors that are always stored in float32, even if they are matrices.

llama.cpp needs norm weights and biases in float32. Routers are stored in float32 because rounding
could change the choice of experts.
"""


def gguf_types() -> list[str]:
    """Return the Hugging Face model types that can be written as GGUF, the most used first."""
    return [name for architecture in ARCHITECTURES for name in architecture.model_types]


def find_gguf_family(config: DecoderConfig, preferred: Family | None = None) -> Family:
    """Choose a Hugging Face model type for a config so that llama.cpp computes it correctly.

    Args:
        config: the model's config.
        preferred: the model type to use if it fits.

    Raises:
        WorkhorseError: no model type fits; the message names the differences.
    """
    own = [preferred] if preferred and preferred.model_type in gguf_types() else []
    fitting = [
        (family, equivalent)
        for family in (*own, *map(family_of, gguf_types()))
        if (equivalent := family.equivalent(config)) is not None
    ]
    fitting.sort(key=lambda pair: pair[1] is not config)  # first those without extra neutral parts
    reasons: list[str] = []
    for family, equivalent in fitting:
        architecture = architecture_of(family.model_type)
        data, _ = readable(equivalent, windows=architecture.windows)
        if not (found := architecture.differences(data)):
            return family
        reasons.append(f"{architecture.name}: {in_the_way(found, config)}")
    closest = reasons[0] if reasons else _nearest_architecture(config)
    sayable = fitting or isinstance(preferred or native_class(config), Family)
    other = "as a Hugging Face directory (--to hf) or " if sayable else ""
    raise WorkhorseError(
        f"llama.cpp cannot compute this model; nearest is {closest}; keep it {other}in Workhorse's "
        "own format (--to workhorse)"
    )


def _nearest_architecture(config: DecoderConfig) -> str:
    """Describe the nearest architecture for a config that fits none, with the differences."""
    found = [
        (architecture_of(name).name, family_of(name).differences(config)) for name in gguf_types()
    ]
    return nearest_of(found, config)


def write_gguf(
    path: Path,
    decoder: Decoder,
    *,
    model_type: str,
    tokenizer: "Tokenizer | None" = None,
    dtype: GgufType = "f16",
    name: str = "",
    stop_tokens: Sequence[int] = (),
) -> list[str]:
    """Write a GGUF file, completely or not at all.

    Args:
        path: path of the file; an existing file is replaced.
        decoder: the decoder to write.
        model_type: one of `gguf_types()`.
        tokenizer: the tokenizer to store in the file. Without it, llama.cpp handles only token ids.
        dtype: type of the matrices; vectors and routers stay in float32. With `q4_0` and `q4_k`,
            the embedding and the head are in Q8_0. A matrix whose rows are not a whole number of
            blocks is in Q5_0 or in 16 bits.
        name: the model name that programs show.
        stop_tokens: ids of the tokens that end generation; if empty, the tokenizer's eos.

    Returns:
        Warnings about differences in llama.cpp, one line each.

    Raises:
        WorkhorseError: the package gguf is missing, llama.cpp does not support this model or
            tokenizer, or the file cannot be written.
    """
    if dtype not in FILE_TYPES:
        raise WorkhorseError(f"dtype={dtype!r} is not supported; choose {', '.join(FILE_TYPES)}")
    architecture = architecture_of(model_type)
    equivalent = family_of(model_type).equivalent(decoder.config)
    if equivalent is not None:
        decoder = to_equivalent(decoder, equivalent)
    data, remarks = readable(decoder.config, windows=architecture.windows)
    if differences := architecture.differences(data):
        raise WorkhorseError(
            f"llama.cpp's architecture {architecture.name} cannot compute this model: "
            f"{'; '.join(differences)}; keep it as a Hugging Face directory"
        )
    keys = model_metadata(architecture, data)
    if tokenizer is not None:
        words, more = tokenizer_metadata(tokenizer, decoder.config.vocab_size, stop_tokens)
    else:
        ends, more = end_metadata(stop_tokens, None)
        words = {**NO_VOCABULARY, **ends}
    general = {"general.name": name} if name else {}
    general[OWN_CONFIG] = json.dumps(decoder.config.to_dict(), separators=(",", ":"))
    general |= {"general.file_type": FILE_TYPES[dtype], "general.quantization_version": 2}
    plans = plan_tensors(architecture, decoder)
    weights = decoder.embedding.tokens.weight.dtype
    kinds = [_stored(plan, dtype, "f16" if weights == torch.float16 else "bf16") for plan in plans]
    write_file(path, architecture, {**general, **keys, **words}, plans, kinds)
    return remarks + more + _larger(plans, kinds, dtype)


def architecture_of(model_type: str) -> Architecture:
    """The architecture of llama.cpp for a model type.

    Raises:
        WorkhorseError: there is none.
    """
    for architecture in ARCHITECTURES:
        if model_type in architecture.model_types:
            return architecture
    raise WorkhorseError(
        f"llama.cpp files of model type {model_type!r} are not supported; "
        f"{nearest(model_type, gguf_types())}"
    )


def write_file(
    path: Path,
    architecture: Architecture,
    keys: Mapping[str, Any],
    plans: list[TensorPlan],
    types: list[str],
) -> None:
    """Stream the tensors into a temporary file next to `path`, then rename it."""
    gguf = gguf_package("writing GGUF")
    kinds = [gguf.GGMLQuantizationType[kind.upper()] for kind in types]
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture.name)
        try:
            for key, value in keys.items():
                _add(writer, key, value)
            for plan, kind in zip(plans, kinds, strict=True):
                block, size = gguf.GGML_QUANT_SIZES[kind]
                bytes_ = math.prod(plan.shape) // block * size
                writer.add_tensor_info(plan.name, plan.shape, np.dtype(np.float32), bytes_, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for plan, kind in zip(plans, kinds, strict=True):
                values = _encoded(plan, kind, keys.get("general.type", "model"))
                writer.write_tensor_data(values.view(_Whole))
            writer.close()
        finally:
            with suppress(OSError):
                writer.close()


class _Whole(np.ndarray):
    """An array with a `tofile` that raises an error on a full disk. NumPy's may lose data."""

    def tofile(self, fid: Any, sep: str = "", format: str = "%s") -> None:
        fid.write(self.data)


def _stored(plan: TensorPlan, dtype: GgufType, half: str) -> str:
    """Choose the GGUF type of a tensor; `half` if no block size divides its row length."""
    if len(plan.shape) == 1 or plan.name.endswith(PRECISE):
        return "f32"
    if dtype not in SMALLER:
        return dtype
    fitting = ("q8_0",) if plan.name in FINE else SMALLER[dtype]
    return next((kind for kind in fitting if not plan.shape[-1] % BLOCKS[kind.upper()][0]), half)


def _larger(plans: list[TensorPlan], kinds: list[str], dtype: GgufType) -> list[str]:
    """Return warnings about tensors with rows that require a larger type than requested."""
    if dtype not in SMALLER:
        return []
    allowed = {dtype, "q8_0", "f32"}
    found: dict[tuple[str, int], list[str]] = {}
    for plan, kind in zip(plans, kinds, strict=True):
        if kind not in allowed:
            found.setdefault((kind, plan.shape[-1]), []).append(plan.name)
    return [
        f"rows of {width} values are not a whole number of {dtype.upper()} blocks; written as "
        f"{kind.upper()}: {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}"
        for (kind, width), names in found.items()
    ]


def _encoded(plan: TensorPlan, kind: Any, of: str) -> np.ndarray:
    """Compute a tensor of a model or adapter and encode it in a GGUF type."""
    tensor = plan.make().contiguous()
    assert tensor.shape == plan.shape, plan.name
    check_numbers(plan.name, tensor, of)
    values = tensor.numpy()
    finite = values[np.isfinite(values)] if values.ndim == 1 else values
    largest = np.maximum(finite.max(initial=0), -finite.min(initial=0))
    # the scales of quantised types are float16
    limit = np.finfo(np.float32 if kind.name in ("F32", "BF16") else np.float16).max
    if largest > limit:
        raise WorkhorseError(f"{plan.name} has values beyond float16's range; choose bf16 or f32")
    return quantize(values, kind)


def _add(writer: Any, key: str, value: object) -> None:
    """Add a metadata key to a GGUF writer, with the GGUF type for its Python value."""
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)
