"""Writes a decoder as a Hugging Face directory, or raises an error with the reasons."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workhorse.checkpoints.huggingface.load import CONFIG_FILE, GENERATION_FILE
from workhorse.checkpoints.huggingface.tensor_folder import TensorToWrite, write_tensors
from workhorse.checkpoints.model_folder import make_folder
from workhorse.checkpoints.runs.manifest import Disk
from workhorse.checkpoints.tensors import weights_of
from workhorse.devices.names import dtype_name
from workhorse.errors import WorkhorseError
from workhorse.models.huggingface import Family, in_the_way, native_class
from workhorse.models.huggingface.family import NEUTRAL
from workhorse.models.huggingface.moves import plan, written_tensors
from workhorse.nn import Decoder, DecoderConfig

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer


@torch.no_grad()
def to_equivalent(decoder: Decoder, config: DecoderConfig) -> Decoder:
    """Convert a decoder to an equivalent config. The new decoder computes the same function.

    Args:
        decoder: any decoder; its tensors are shared, not copied.
        config: an equivalent config from `Family.equivalent`. If it has additional weights, such as
            biases, they are set to values without effect (see `NEUTRAL`).
    """
    if config is decoder.config:
        return decoder
    wider = config.build("eager", device="meta")
    ours = weights_of(decoder)
    embedding = ours["embedding.tokens.weight"]
    for name, empty in weights_of(wider).items():
        if name == "head.proj.weight":
            ours.setdefault(name, embedding)
        elif name not in ours:
            neutral = NEUTRAL[name.rpartition(".")[2]]
            ours[name] = torch.full_like(empty, neutral, dtype=embedding.dtype, device="cpu")
    wider.load_state_dict(ours, strict=False, assign=True)
    wider.tie_weights()
    return wider.eval()


class Replaced(Mapping[str, Tensor]):
    """Weights by name: `others` in place of those with the same name.

    An untied head that only the written config has is the embedding.

    Args:
        own: all weights of the written decoder.
        others: the weights that replace them.
    """

    def __init__(self, own: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
        self.own = own
        self.others = others

    def __getitem__(self, name: str) -> Tensor:
        if name in self.others:
            return self.others[name]
        if name == "head.proj.weight":
            return self.others["embedding.tokens.weight"]
        return self.own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)


def find_family(config: DecoderConfig) -> Family:
    """Return the first model type that can express a config or an equivalent one.

    Raises:
        WorkhorseError: no model type can; the message names the differences from the nearest.
    """
    found = native_class(config)
    if isinstance(found, str):
        raise WorkhorseError(
            f"no transformers class can represent this model; nearest is {found}; change that in "
            "the recipe and train again, or use Workhorse's own format (--to workhorse)"
        )
    return found


def tensors_to_write(
    decoder: Decoder,
    family: Family,
    dtype: torch.dtype,
    weights: Mapping[str, Tensor] | None = None,
) -> tuple[DecoderConfig, list[TensorToWrite]]:
    """Return the config and the tensors of a Hugging Face directory; see `write_huggingface`."""
    equivalent = family.equivalent(decoder.config)
    if equivalent is None:
        differences = in_the_way(family.differences(decoder.config), decoder.config)
        raise WorkhorseError(f"cannot be exported as {family.architecture}: {differences}")
    decoder = to_equivalent(decoder, equivalent)
    own = weights_of(decoder)
    shapes = {name: tuple(weight.shape) for name, weight in own.items()}
    moves = plan(family.rules, shapes, decoder.config)
    written = own if weights is None else Replaced(own, weights)
    return decoder.config, written_tensors(moves, written, dtype, shapes)


def huggingface_tensors(
    decoder: Decoder, family: Family | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `write_huggingface` writes, by name, on the device of the decoder.

    Each is computed when it is reached; one that needs no change shares memory with the decoder.
    """
    family = family or find_family(decoder.config)
    first = decoder.embedding.tokens.weight
    _, tensors = tensors_to_write(decoder, family, dtype or first.dtype)
    for name, _, kept, make in tensors:
        yield name, make().to(first.device, kept)


def write_huggingface(
    folder: Path,
    decoder: Decoder,
    *,
    family: Family | None = None,
    tokenizer: "Tokenizer | None" = None,
    dtype: torch.dtype | None = None,
    stop_tokens: tuple[int, ...] = (),
    weights: Mapping[str, Tensor] | None = None,
) -> Family:
    """Write a decoder so that transformers loads it with one of its own classes.

    Args:
        folder: a new or empty folder; it is written completely or not at all.
        decoder: the decoder to write.
        family: the model type; by default the first that fits.
        tokenizer: the tokenizer to write beside the weights, or None.
        dtype: dtype of the written weights; the decoder's dtype by default.
        stop_tokens: ids of the tokens that end generation; if empty, the tokenizer's eos.
        weights: weights to write in place of the decoder's, by name.

    Returns:
        The model type that was written.

    Raises:
        WorkhorseError: no model type can express this config, or the folder cannot be written.
    """
    family = family or find_family(decoder.config)
    dtype = dtype or decoder.embedding.tokens.weight.dtype
    written, tensors = tensors_to_write(decoder, family, dtype, weights)
    ids = _special_ids(tokenizer, stop_tokens)
    config = family.write(written) | ids | {"dtype": dtype_name(dtype)}

    def fill(temporary: Path) -> None:
        _write_json(temporary / CONFIG_FILE, config)
        if ids:
            _write_json(temporary / GENERATION_FILE, ids)
        write_tensors(temporary, tensors)
        if tokenizer is not None:
            tokenizer.save(temporary, model_type=family.model_type)

    make_folder(folder, fill)
    return family


def _special_ids(
    tokenizer: "Tokenizer | None", stop_tokens: tuple[int, ...]
) -> dict[str, int | list[int]]:
    """Return the ids of special tokens, by the key that transformers has for each."""
    ids: dict[str, int | list[int]] = {}
    if tokenizer is not None:
        roles = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
        ids |= {f"{role}_token_id": at for role, at in roles.items() if at is not None}
    if stop_tokens:
        first, *others = stop_tokens
        ids["eos_token_id"] = [first, *others] if others else first
    return ids


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    Disk().write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
