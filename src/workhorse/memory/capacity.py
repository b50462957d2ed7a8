"""What fits into memory: a loaded model, a KV cache, a training run and its micro-batch."""

import math
import sys
from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from workhorse.checkpoints.runs.run_directory import RunDirectory
from workhorse.checkpoints.stored import Held, StoredModel, bytes_on_disk, weights_on_disk
from workhorse.devices.memory import available, check_fits, free_memory, size
from workhorse.devices.names import dtype_name, training_dtype
from workhorse.devices.tape import without_data
from workhorse.errors import WorkhorseError
from workhorse.memory.device_memory import device_memory
from workhorse.models.describe import count_parameters, flops_per_token
from workhorse.native import resolve
from workhorse.nn import DecoderConfig
from workhorse.nn.cache.paged import BLOCK, Store
from workhorse.nn.cache.paged_view import PagedView
from workhorse.nn.convolution import ShortConvolution
from workhorse.optim.groups import build_optimizer
from workhorse.optim.master_weights import round_weights
from workhorse.parallel.config import UNDIVIDED, ParallelismConfig
from workhorse.parallel.processes import environment

if TYPE_CHECKING:
    from workhorse.train.recipe.recipe import TrainConfig


class LayerCache(NamedTuple):
    """The cache of one layer's attention, or of the inputs of one of its convolutions."""

    bytes_per_token: int
    reach: int | None
    """The most tokens that it keeps: the window's; None: all."""


def cache_of_layers(config: DecoderConfig, dtype: torch.dtype) -> list[LayerCache]:
    """What each layer keeps, as the paged cache allocates it: one entry for each store, in order.

    Args:
        config: of the decoder.
        dtype: that it decodes in.

    Raises:
        WorkhorseError: attention that is not causal has no cache.
    """
    names = config.layer_names()
    kinds = tuple(dict.fromkeys(names))  # layers of one name are alike
    with without_data(), torch.no_grad():
        decoder = config.replace(n_layers=len(kinds), pattern=kinds).build(dtype=dtype).eval()
        cache = decoder.new_paged_cache(tokens=config.max_seq_len, sequences=1)
        view = PagedView(cache, [cache.new_sequence()])
        decoder.hidden(torch.zeros(1, 1, dtype=torch.int64), cache=view)
        stores = iter(cache.stores)
        found: dict[str, list[LayerCache]] = {}
        for name, layer in zip(kinds, decoder.layers, strict=True):
            short = sum(isinstance(part, ShortConvolution) for part in layer.modules())
            found[name] = [_kept(store) for store in islice(stores, 1 + short)]
    return [room for name in names for room in found[name]]


def _kept(store: Store) -> LayerCache:
    assert store.k is not None
    assert store.v is not None
    slots = store.pool.count * BLOCK
    return LayerCache((store.k.nbytes + store.v.nbytes) // slots, store.pool.reach)


def cache_bytes(layers: list[LayerCache], tokens: int) -> int:
    """Bytes that a text of so many tokens keeps, not rounded up to whole blocks."""
    return sum(layer.bytes_per_token * min(tokens, layer.reach or tokens) for layer in layers)


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


LONG = 2e14
"""Floating-point operations of a run so long that recording a step delays it by less than 1 %."""


def check_training(
    config: DecoderConfig,
    train: "TrainConfig",
    device: torch.device,
    *,
    packed: bool = False,
    parallel: ParallelismConfig = UNDIVIDED,
) -> None:
    """Refuse to train what memory has no room for.

    Weights, gradients and optimizer are counted at once. On a CPU, where the system would end the
    process, the whole step is recorded as well, if the run is long enough to be worth it; CUDA says
    by itself when its memory is full.

    Args:
        config: of the decoder.
        train: how it is trained; `micro_batch_size` is a number or None.
        device: where.
        packed: whether rows hold several documents.
        parallel: how weights and batch are divided; every process on this machine needs as much.

    Raises:
        WorkhorseError: there is less.
    """
    check_held(config, train, device, parallel)
    decoder = config.build(train.kernel, device="meta")
    operations = train.tokens_per_step * flops_per_token(decoder, train.seq_len)
    is_long = train.steps is None or train.steps * operations >= LONG
    if device.type == "cpu" and is_long:
        rows = train.micro_batches(parallel).size
        what = f"a step with {rows:,} rows of {train.seq_len:,} tokens at once"
        remedy = "set train.micro_batch_size=auto, or see what workhorse plan suggests"
        needed = step_bytes(config, train, device, packed=packed, parallel=parallel)
        _check(needed, device, what, remedy)


def check_held(
    config: DecoderConfig,
    train: "TrainConfig",
    device: torch.device,
    parallel: ParallelismConfig = UNDIVIDED,
) -> None:
    """Refuse to train where weights, gradients and optimizer alone have no room.

    Raises:
        WorkhorseError: there is less.
    """
    decoder = config.build(train.kernel, device="meta")
    narrow = training_dtype(train.dtype, device) == torch.bfloat16
    low_bits = round_weights(decoder) if narrow else {}
    optimizer = build_optimizer(decoder, train.optimizer, low_bits)
    learning = [weight for weight in decoder.parameters() if weight.requires_grad]
    held = [*decoder.parameters(), *learning, *optimizer.tensors().values(), *low_bits.values()]
    what = "the model with its gradients and optimizer"
    ways = max(parallel.weight_parts, parallel.expert) * parallel.tensor * parallel.pipeline
    needed = _bytes(held) // ways
    _check(needed, device, what, "take a smaller model, or a device with more memory")


def _check(n_bytes: int, device: torch.device, what: str, remedy: str) -> None:
    """Refuse what each of the processes that share this device's memory needs."""
    sharers = environment.count_here() if device.type == "cpu" else 1
    if sharers > 1:
        what += f" in {sharers} processes"
        remedy = f"start fewer, divide the weights by parallel.shard, or {remedy}"
    check_fits(sharers * n_bytes, device, what, remedy)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


MARGIN, SCATTERED = 0.1, 0.3
"""Fraction of the free memory that is left for validation, samples, what operators need inside
themselves, and gaps; and where the C library's heap scatters the tensors of a CPU."""


def fit_micro_batch(
    config: DecoderConfig,
    train: "TrainConfig",
    device: torch.device,
    *,
    packed: bool = False,
    parallel: ParallelismConfig = UNDIVIDED,
) -> "TrainConfig":
    """The settings with a number for `micro_batch_size: auto`; others as they are.

    Nothing is tried out: steps are recorded on tensors without data, before the model is made, and
    the number follows from them and from how much memory is free.

    Args:
        config: of the decoder.
        train: how it is trained.
        device: where.
        packed: whether rows hold several documents.
        parallel: how the batch is divided; processes on this machine share its memory.

    Raises:
        WorkhorseError: not even one row fits, or free memory is not known on this device.
    """
    if train.micro_batch_size != "auto":
        return train
    check_fitting(device)
    free = available(device) if device.type == "cuda" else free_memory()
    assert free is not None  # `check_fitting` refused
    if device.type == "cpu":
        free //= environment.count_here(parallel.processes)

    @cache
    def needed(rows: int) -> int:
        tried = train.replace(micro_batch_size=rows)
        return step_bytes(config, tried, device, packed=packed, parallel=parallel)

    most = parallel.micro_batches(train.batch_size).size
    together = train.objective.rows_together
    rows = largest_share(needed, usable(free, device), most, together)
    if not rows:
        raise WorkhorseError(
            f"one row of {train.seq_len} tokens needs {size(needed(1))} and {size(free)} are free "
            f"on {device.type}, of which a step may take {size(usable(free, device))}; shorten "
            "train.seq_len, set train.activation_checkpointing=true, or take a smaller model"
        )
    return train.replace(micro_batch_size=rows)


def usable(free: int, device: torch.device) -> int:
    """Of the free memory, the bytes that a step may take."""
    scattered = device.type == "cpu" and resolve("heap", wait=True).heap is None
    return int((1 - (SCATTERED if scattered else MARGIN)) * free)


def check_fitting(device: torch.device) -> None:
    """Raise WorkhorseError if free memory is not known on this device."""
    if device.type not in ("cpu", "cuda"):
        raise WorkhorseError(
            f"micro_batch_size=auto works on CUDA and on a CPU, and device is {device}; "
            "give a number"
        )
    if device.type == "cpu" and free_memory() is None:
        raise WorkhorseError(
            f"micro_batch_size=auto cannot tell how much memory is free on {sys.platform}; "
            "give a number"
        )


def step_bytes(
    config: DecoderConfig,
    train: "TrainConfig",
    device: torch.device,
    *,
    packed: bool = False,
    parallel: ParallelismConfig = UNDIVIDED,
) -> int:
    """The most bytes of a step in one process, with the copies that float16's autocast makes.

    Args:
        config: of the decoder.
        train: how it is trained; `micro_batch_size` is a number or None.
        device: where.
        packed: whether rows hold several documents.
        parallel: how weights and batch are divided.
    """
    recorded = recordable(train, device)
    found = device_memory(config, recorded, device, parallel, packed=packed)
    copies = 2 * count_parameters(config)["total"] if train.dtype == "float16" else 0
    return found.total + copies


def recordable(train: "TrainConfig", device: torch.device) -> "TrainConfig":
    """Settings whose step can be recorded: float16's as float32's, without autocast's copies."""
    dtype = str(training_dtype(train.dtype, device)).removeprefix("torch.")
    return train.replace(dtype="float32" if dtype == "float16" else dtype)


def largest_share(needed: Callable[[int], int], room: int, rows: int, together: int = 1) -> int:
    """The largest of `shares` for which `needed`, which grows, is at most `room`; 0 if none is."""
    sizes = shares(rows, together)
    first, last = 0, len(sizes)  # the whole is looked at first, then the middle of what is left
    while first < last:
        at = (first + last) // 2 if first else 0
        first, last = (first, at) if needed(sizes[at]) <= room else (at + 1, last)
    return sizes[first] if first < len(sizes) else 0


def shares(rows: int, together: int = 1) -> list[int]:
    """All of the rows, half of them … one, rounded up; or of groups of so many rows."""
    groups = rows // together
    halvings = math.ceil(math.log2(groups))
    return [together * math.ceil(groups / 2**count) for count in range(halvings + 1)]
