"""Writes the adapter of a decoder as a file that llama.cpp adds to its base (`--lora`).

For each tensor of the base's GGUF file that has an update, the file has `NAME.lora_a` (rank, in)
and `NAME.lora_b` (out, rank), in float32. llama.cpp computes `W + alpha / rank · B A`.
"""

import math
from pathlib import Path

from workhorse.checkpoints.gguf.tensors import SHAPED, TensorPlan, joined, tensor_parts
from workhorse.checkpoints.gguf.write import architecture_of, find_gguf_family, write_file
from workhorse.checkpoints.low_rank import updates_of, with_shared_a
from workhorse.errors import WorkhorseError
from workhorse.models.huggingface import Family
from workhorse.nn import Decoder
from workhorse.transforms.adapters import adapters_of


def write_gguf_adapter(
    path: Path, decoder: Decoder, family: Family, *, name: str = "default"
) -> int:
    """Write an adapter, completely or not at all.

    Args:
        path: path of the new file.
        decoder: the decoder with the adapter.
        family: the model type of the base.
        name: the name of the adapter.

    Returns:
        The number of elements of the written tensors.

    Raises:
        WorkhorseError: llama.cpp cannot apply the adapter, or a value is infinite or NaN.
    """
    config = adapters_of(decoder)[name]
    architecture = architecture_of(find_gguf_family(decoder.config, family).model_type)
    for option, given in (("dora", config.dora), ("also_train", config.also_train)):
        if given:
            raise WorkhorseError(
                f"llama.cpp has no adapters with {option}; convert the merged model (--to gguf)"
            )
    base = decoder.config.build(device="meta")
    updates = updates_of(decoder, name)
    plans: list[TensorPlan] = []
    for tensor, parts in tensor_parts(architecture, base).items():
        names = [part.ours for part in parts]
        if updates.keys().isdisjoint(names) or tensor.split(".")[-2] in SHAPED:
            continue
        own_updates = [updates.pop(name, None) for name in names]
        shapes = [tuple(base.get_parameter(name).shape) for name in names]
        a, all_b, alpha = with_shared_a(own_updates, shapes, config.divisor)
        rank = a.shape[-2]
        factor = alpha / config.divisor(rank) * rank / config.alpha  # the file has one alpha
        scaled = {name: b * factor for name, b in zip(names, all_b, strict=True)}
        ((_, rows),) = tensor_parts(architecture, base, scaled).items()
        b = joined(f"{tensor}.lora_b", rows)
        plans += [TensorPlan(f"{tensor}.lora_a", tuple(a.shape), a.float().cpu), b]
    if updates:
        # The merged model has a separate head then, which some architectures of llama.cpp lack.
        to = "hf" if decoder.config.head.tied and "head.proj.weight" in updates else "gguf"
        raise WorkhorseError(
            f"llama.cpp has no adapter for {min(updates)} of {architecture.name}; convert the "
            f"merged model (--to {to})"
        )
    keys = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(config.alpha),
    }
    write_file(path, architecture, keys, plans, ["f32"] * len(plans))
    return sum(math.prod(plan.shape) for plan in plans)
