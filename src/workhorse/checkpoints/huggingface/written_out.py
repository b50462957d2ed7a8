"""A model with the extra parts that a file format demands, which change nothing."""

import torch

from workhorse.checkpoints.tensors import weights_of
from workhorse.models.huggingface.family import NEUTRAL
from workhorse.nn import Decoder, DecoderConfig


@torch.no_grad()
def written_out(decoder: Decoder, config: DecoderConfig) -> Decoder:
    """The same model as a decoder of an equivalent config.

    Args:
        decoder: any decoder; its tensors are shared.
        config: from `Family.equivalent`. Parts that only it has get weights that change nothing,
            see `NEUTRAL`.
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
