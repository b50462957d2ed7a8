"""Decoders that consist of a base, stored elsewhere, and an adapter.

A run that trains an adapter stores only the trained weights. Its state has the options of the
adapter, the name of its base and the SHA-256 of the base's weights.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workhorse.checkpoints.tensors import (
    Places,
    allocate,
    mapped_weights,
    weights_of,
    with_rows,
)
from workhorse.config.base import ConfigError
from workhorse.devices.transfer import Destination, copy_tensors
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import KernelName
from workhorse.nn.experts.router import ALWAYS_FLOAT32
from workhorse.optim.master_weights import LocalShard
from workhorse.parallel.config import ParallelismConfig
from workhorse.transforms.adapters import adapter_parameters, add_adapter, freeze
from workhorse.transforms.lora import LoraConfig
from workhorse.transforms.quantization import FormatName, place_codes
from workhorse.transforms.record import transforms_of


class AdapterConfig(LoraConfig):
    """The adapter that a run trains, and the format of its frozen base."""

    quantize: FormatName | None = None
    """Format of the linear layers inside the blocks of the base: `int8`, `int4` (QLoRA,
    2305.14314), or None for the dtype of the training."""

    def trainable(
        self,
        config: DecoderConfig,
        kernel: KernelName,
        device: torch.device,
        dtype: torch.dtype,
        weights: Iterable[tuple[str, Tensor]] = (),
        *,
        seed: int = 0,
    ) -> Decoder:
        """Build a frozen decoder with a new adapter, for training with `dtype`.

        Frozen weights have this dtype. Weights that are trained are float32.

        Args:
            config: the config of the base.
            kernel: the implementation of attention.
            device: the device of the decoder.
            dtype: the dtype of the training.
            weights: the weights of the base; without them its values are not set.
            seed: the seed of the adapter's initial values.
        """
        decoder = config.build(kernel, device="meta", dtype=torch.float32)
        freeze(decoder, self)
        for name, parameter in decoder.named_parameters():
            if dtype == torch.bfloat16 and not (
                parameter.requires_grad or name.endswith(ALWAYS_FLOAT32)
            ):
                parameter.data = parameter.data.to(dtype)
        allocate(decoder, device)
        if self.quantize is None:
            places = {name: LocalShard(one) for name, one in decoder.named_parameters()}
        else:
            places = self.place_codes(decoder)
        for name, values in weights:
            places[name].copy_(values)
        return self.adapt(decoder, seed, torch.float32)

    @property
    def names_a_layer(self) -> bool:
        """True if an option names the number of a layer, so that layers can differ."""
        names = (*self.targets, *self.ranks, *self.alphas, *self.also_train)
        return any(part.isdigit() for name in names for part in name.split("."))

    def check_parallel(self, parallel: ParallelismConfig) -> None:
        """Raise ConfigError if ranks divide weights or sequences."""
        for name in ("shard", "context", "tensor", "pipeline", "expert"):
            if parallel.ways[name] > 1:
                raise ConfigError(
                    f"an adapter does not support parallel.{name}={parallel.ways[name]}; set it to "
                    "1, and use parallel.data"
                )

    def place_codes(self, decoder: Decoder) -> dict[str, Destination]:
        """Quantise the layers of a base; see the function `place_codes`.

        The head stays exact: a tied one needs no memory, and losses compute its logits in parts.
        """
        assert self.quantize is not None
        return place_codes(decoder, self.quantize, inside="layers.")

    def adapt(
        self,
        decoder: Decoder,
        seed: int,
        dtype: torch.dtype | None = None,
        *,
        name: str = "default",
    ) -> Decoder:
        """Add the adapter to the decoder, in place; see `add_adapter`."""
        lora = {field: getattr(self, field) for field in LoraConfig.model_fields}
        return add_adapter(decoder, LoraConfig(**lora), name=name, seed=seed, dtype=dtype)


@dataclass(frozen=True)
class Base:
    """The weights that an adapter was trained on."""

    init: str
    """An absolute path, or an id of the hub."""
    sha256: str
    """Hash of the weights; see `hash_of`."""


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
    from workhorse.checkpoints.stored import open_stored  # it imports run directories

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


def hash_of(weights: Mapping[str, Tensor]) -> str:
    """The SHA-256 of names, dtypes, shapes and values of weights, in hexadecimal.

    It is the hash of one line per weight with its name and its own hash, sorted by name.
    """

    def line(item: tuple[str, Tensor]) -> str:
        name, weight = item
        values = weight.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest = hashlib.sha256(values.data).hexdigest()
        return f"{name} {weight.dtype} {tuple(weight.shape)} {digest}\n"

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        lines = threads.map(line, sorted(weights.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def load_adapted(
    decoder: Decoder, state: Mapping[str, Any], weights: Mapping[str, Tensor], places: Places
) -> None:
    """Load the base and the adapter of a run into a decoder, in place.

    Args:
        decoder: a decoder without values.
        state: the state of the run's checkpoint.
        weights: the weights in the checkpoint.
        places: returns the destinations of the base's weights. If it does not quantise them, they
            get the format of the training.

    Raises:
        WorkhorseError: the base is missing, or it is another one.
    """
    adapter = AdapterConfig.from_dict(state["recipe"]["adapter"])
    _, base = open_base(state["base"]["init"], decoder.config, state["base"]["sha256"])
    into = places(decoder)
    if adapter.quantize is not None and not transforms_of(decoder):
        into = adapter.place_codes(decoder)
    copy_tensors(into, base, "base")
    adapter.adapt(decoder, seed=0)
    copy_adapter(decoder, weights)


def copy_adapter(decoder: Decoder, weights: Mapping[str, Tensor], name: str = "default") -> None:
    """Copy the weights of a checkpoint into the adapter of a decoder, in place.

    A checkpoint names its adapter `default`; here it may have another name.
    """
    parameters = adapter_parameters(decoder, name).items()
    renamed = {
        path.replace(".adapters.default.", f".adapters.{name}."): weight
        for path, weight in weights.items()
    }
    copy_tensors({path: one.detach() for path, one in parameters}, renamed, "adapter")
