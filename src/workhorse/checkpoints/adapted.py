"""Decoders that consist of a base, stored elsewhere, and an adapter.

A run that trains an adapter stores only the trained weights. Its state has the options of the
adapter, the name of its base and the SHA-256 of the base's weights.
"""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from workhorse.checkpoints.tensors import allocate
from workhorse.config.base import ConfigError
from workhorse.devices.transfer import Destination, copy_tensors
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import KernelName
from workhorse.nn.experts.router import ALWAYS_FLOAT32
from workhorse.optim.master_weights import LocalShard
from workhorse.parallel.config import ParallelismConfig
from workhorse.transforms.adapters import adapter_parameters, add_adapter, freeze
from workhorse.transforms.lora import LoraConfig
from workhorse.transforms.quantization import FormatName, place_codes


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
