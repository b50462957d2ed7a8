"""Whether a model's weights fit into memory, before they are read."""

import torch

from workhorse.checkpoints.on_disk import Held, bytes_on_disk, weights_on_disk
from workhorse.checkpoints.runs.run_directory import RunDirectory
from workhorse.checkpoints.stored import StoredModel
from workhorse.devices.memory import available, check_fits
from workhorse.devices.names import dtype_name
from workhorse.models.parameters import count_parameters
from workhorse.nn import DecoderConfig

MAX_EXPANSION = 8
"""Float32 weights take at most this many times their bytes on disk: the ratio for 4-bit weights."""
REMEDY = "choose a narrower dtype (bfloat16), quantize (int8, int4), or a smaller model"


def check_random(
    name: str, config: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse a model whose random weights do not fit into memory.

    Raises:
        WorkhorseError: they do not.
    """
    total = count_parameters(config)["total"] * dtype.itemsize
    what = f"{name} with its weights in {dtype_name(dtype)}"
    check_fits(total, device, what, "choose a narrower dtype (bfloat16), or a smaller model")


def check_stored(
    stored: StoredModel,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    codes_per_byte: int | None,
) -> None:
    """Refuse a stored model whose weights do not fit; those that stay mapped take no memory.

    Args:
        stored: the model.
        device: where its weights go.
        dtype: of the weights; None: as they are stored.
        codes_per_byte: of weights that are quantised while they are read; None: they are not.

    Raises:
        WorkhorseError: they do not.
    """
    size = bytes_on_disk(stored)
    free = available(device)
    if free is None or MAX_EXPANSION * size <= free:  # most are so small that nothing is counted
        return
    dtype = dtype or stored.dtype
    total = count_parameters(stored.config)["total"]
    if codes_per_byte:
        check_fits(total // codes_per_byte, device, f"{stored.path}, quantised,", REMEDY)
        return
    if device.type == "cpu" and not isinstance(stored, RunDirectory):
        total -= weights_on_disk(stored).get(dtype_name(dtype), Held(0, 0)).numbers
    what = f"{stored.path} with its weights in {dtype_name(dtype)}"
    check_fits(max(total, 0) * dtype.itemsize, device, what, REMEDY)
