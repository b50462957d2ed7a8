"""Convert multi-head to grouped-query attention: average groups of key and value heads.

The converted model needs further training (2305.13245 §2.1 uses 5 % of the original steps).
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.blocks import BlockConfig
from workhorse.transforms.record import check, inherit, record

_EACH_HEAD = re.compile(r"(layers\.\d+\.attention\.k_norm\.heads\.)(\d+)\.(.+)")
_ALL_HEADS = re.compile(r"layers\.\d+\.attention\.(k_proj|v_proj|k_norm\.norm)\..+")
"""Names of tensors that contain all key or value heads, concatenated along the first axis."""


def grouped(config: DecoderConfig, n_kv_heads: int) -> DecoderConfig:
    """Return the config with `n_kv_heads` key and value heads in every layer.

    Raises:
        WorkhorseError: `n_kv_heads` does not divide the number of key and value heads of a layer,
            or a layer has latent attention.
    """
    blocks = {name: _grouped(block, n_kv_heads) for name, block in config.blocks.items()}
    return config.replace(blocks=blocks)


def _grouped(block: BlockConfig, n_kv_heads: int) -> BlockConfig:
    attention = block.grouped
    if attention is None:
        raise WorkhorseError(
            f"n_kv_heads={n_kv_heads} is not possible with latent attention, which stores "
            "one vector for all heads; omit n_kv_heads"
        )
    held = attention.n_kv_heads or attention.n_heads
    if n_kv_heads < 1 or held % n_kv_heads:
        fitting = ", ".join(str(n) for n in range(1, held + 1) if held % n == 0)
        raise WorkhorseError(
            f"n_kv_heads={n_kv_heads} does not divide the {held} key and value heads; "
            f"choose one of {fitting}"
        )
    return block.replace(attention=attention.replace(n_kv_heads=n_kv_heads))


@torch.no_grad()
def group_heads(decoder: Decoder, n_kv_heads: int) -> Decoder:
    """Return a decoder with `n_kv_heads` key and value heads, each the mean of adjacent heads.

    Biases, and the weights of norms per key head, are averaged too. If the heads of a group are
    equal, the decoder's outputs do not change; otherwise it needs further training.

    Args:
        decoder: the decoder, as its config builds it. The new decoder shares its tensors, except
            those of keys and values.
        n_kv_heads: a divisor of every layer's number of key and value heads.

    Raises:
        WorkhorseError: see `grouped`; or the decoder is quantised or prepared for execution.

    Paper: GQA, 2305.13245 §2.1.
    """
    check(decoder, "group_heads")
    config = grouped(decoder.config, n_kv_heads)
    fewer = config.build("auto", device="meta")
    ours = {name: weight.detach() for name, weight in decoder.named_parameters()}
    shapes = {name: weight.shape for name, weight in fewer.named_parameters()}
    held = {name: _averaged(name, shape, ours, n_kv_heads) for name, shape in shapes.items()}
    fewer.load_state_dict(held, strict=False, assign=True)
    fewer.tie_weights()
    inherit(fewer, decoder)
    record(fewer, "group_heads", n_kv_heads=n_kv_heads)
    return fewer.train(decoder.training)


def _averaged(name: str, shape: torch.Size, ours: dict[str, Tensor], n_kv_heads: int) -> Tensor:
    """Compute a tensor of the decoder with fewer heads.

    Tensors of keys and values are averaged over the heads of each group; others are shared.

    Args:
        name: name of the tensor in the decoder with fewer heads.
        shape: shape of the tensor in the decoder with fewer heads.
        ours: the tensors of the original decoder, by name.
        n_kv_heads: number of key and value heads of the new decoder.
    """
    if found := _EACH_HEAD.fullmatch(name):
        before, head, what = found.groups()
        heads = sum(other.startswith(before) and other.endswith(what) for other in ours)
        size = heads // n_kv_heads
        members = range(int(head) * size, (int(head) + 1) * size)
        return _mean([ours[f"{before}{member}.{what}"] for member in members])
    if _ALL_HEADS.fullmatch(name) and ours[name].shape != shape:
        heads = ours[name].unflatten(0, (n_kv_heads, -1, shape[0] // n_kv_heads))
        return _mean(heads.unbind(1)).flatten(0, 1)
    return ours[name]


def _mean(heads: Sequence[Tensor]) -> Tensor:
    """The mean of tensors, computed in float32 and returned in their dtype."""
    return torch.stack([head.float() for head in heads]).mean(dim=0).to(heads[0].dtype)
