"""Measurements of a training step, without the code that predicts it."""

import gc
import math
from collections import Counter
from itertools import accumulate
from weakref import ref

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from workhorse.checkpoints.adapted import AdapterConfig
from workhorse.data import Batch
from workhorse.devices.names import training_dtype
from workhorse.nn import Decoder, DecoderConfig, TokenLogprobs
from workhorse.nn.cache.paged import BLOCK
from workhorse.nn.cache.paged_view import PagedView
from workhorse.parallel.config import UNDIVIDED, ParallelismConfig
from workhorse.parallel.division.teams import absent_teams
from workhorse.train.objectives.next_token import NextToken
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.step.build import build_step
from workhorse.train.step.step import TrainingStep

CPU = torch.device("cpu")


def random_batch(config: DecoderConfig, train: TrainConfig, *, packed: bool = False) -> Batch:
    """Random tokens; with `packed`, each row has two documents."""
    rows, seq = train.batch_size, train.seq_len
    tokens = torch.randint(config.vocab_size, (rows, seq))
    documents = (torch.arange(seq) >= seq // 2).long().expand(rows, seq) if packed else None
    return Batch(tokens, tokens, documents, torch.zeros(rows, dtype=torch.int64))


def make_step(
    config: DecoderConfig,
    train: TrainConfig,
    parallel: ParallelismConfig = UNDIVIDED,
    adapter: AdapterConfig | None = None,
) -> TrainingStep:
    torch.manual_seed(0)
    if adapter is not None:
        dtype = training_dtype(train.dtype, CPU)
        decoder = adapter.trainable(config, train.kernel, CPU, dtype, config.draw(CPU))
        return build_step(decoder, train, CPU)
    teams = absent_teams(parallel, config.vocab_size)
    decoder = teams.build(config, train.kernel, CPU)
    return build_step(decoder, train, CPU, parallel=parallel, teams=teams, whole=config)


class Saved:
    """A tensor saved by autograd; it is alive as long as autograd keeps it."""

    def __init__(self, tensor: Tensor, part: str) -> None:
        self.tensor, self.part = tensor.detach(), part  # detach avoids a reference cycle

    def unpack(self) -> Tensor:
        return self.tensor


def kept_by_autograd(
    config: DecoderConfig,
    train: TrainConfig,
    parallel: ParallelismConfig = UNDIVIDED,
    *,
    packed: bool = False,
    adapter: AdapterConfig | None = None,
) -> Counter[str]:
    """Bytes saved for the backward pass, by the layer that saves them first; `head` is the loss.

    Counts each storage once, from saved-tensor hooks and from tensors that checkpointing keeps in
    closures. Random generator states, weights and the batch itself do not count.
    """
    step = make_step(config, train, parallel, adapter)
    batch = random_batch(config, train, packed=packed)
    part = ["embedding"]

    def enter(label: str):
        return lambda *_: part.__setitem__(0, label)

    (decoder,) = (m for m in step.objective.modules() if hasattr(m, "max_positions"))
    for name, layer in decoder.layers.named_children():
        layer.register_forward_pre_hook(enter(f"layers.{name}"))
    layer.register_forward_hook(enter("final_norm"))
    (loss,) = (m for m in step.objective.modules() if isinstance(m, TokenLogprobs))
    saved: list[ref[Saved]] = []
    hidden: list[int] = []
    closures: list[ref[Tensor]] = []

    def save(tensor: Tensor) -> Saved:
        # A tensor made by the layers counts for them even if only the loss saves it.
        one = Saved(tensor, "final_norm" if storage_of(tensor) in hidden else part[0])
        saved.append(ref(one))
        return one

    def enter_head(_: object, inputs: tuple[Tensor, ...]) -> None:
        hidden.append(storage_of(inputs[0]))
        known = {*before, *hidden}
        closures.extend(ref(one) for key, one in python_tensors().items() if key not in known)
        part[0] = "head"

    loss.register_forward_pre_hook(enter_head)
    before = python_tensors()
    with torch.autograd.graph.saved_tensors_hooks(save, Saved.unpack):
        outcome = step.objective(batch)
    given = (*step.objective.parameters(), *step.objective.buffers(), batch.tokens, outcome.loss)
    given += () if batch.documents is None else (batch.documents,)
    seen = {storage_of(tensor) for tensor in given}
    states = torch.get_rng_state().shape
    kept: Counter[str] = Counter()
    every = [one for find in saved if (one := find()) is not None]
    held = [one for find in closures if (one := find()) is not None and one.shape != states]
    for one in (*every, *(Saved(tensor, "closures") for tensor in held)):
        if storage_of(one.tensor) not in seen:
            seen.add(storage_of(one.tensor))
            kept[one.part] += one.tensor.untyped_storage().nbytes()
    return kept


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def python_tensors() -> dict[int, Tensor]:
    """Dense tensors that Python objects hold, by the identity of their storages."""
    found = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    return {storage_of(one): one for one in found if one.layout == torch.strided}


def held_by(
    config: DecoderConfig, train: TrainConfig, adapter: AdapterConfig | None = None
) -> dict[str, int]:
    """Bytes of the tensors that are held between steps."""
    step = make_step(config, train, adapter=adapter)
    tensors = {
        "weights": [*step.objective.parameters(), *step.objective.buffers()],
        "low_bits": step.optimizer.masters.low_bits.values(),
        "optimizer": step.optimizer.tensors().values(),
    }
    counted = {kind: sum(one.nbytes for one in some) for kind, some in tensors.items()}
    return {kind: n_bytes for kind, n_bytes in counted.items() if n_bytes}


def gradient_bytes(config: DecoderConfig, train: TrainConfig) -> int:
    """Bytes of the gradients after the passes of a step; sparse ones count their values."""
    step = make_step(config, train)
    step.backward(random_batch(config, train))
    found = [one.grad for one in step.objective.parameters() if one.grad is not None]
    return sum((one._values() if one.is_sparse else one).nbytes for one in found)


def counted_by_pytorch(decoder: Decoder, batch: Batch) -> int:
    """Floating-point operations of a forward and a backward pass, as PyTorch counts them.

    PyTorch's counter does not support the grouped matmul of experts, so a formula is registered.
    Nor does it support fused attention on a CPU, so the decoder's kernel must be `eager`.
    """

    def grouped(a: list[int], b: list[int], *_: object, **__: object) -> int:
        return 2 * math.prod(a[-2:]) * b[-1]

    known = {torch.ops.aten._grouped_mm: grouped}
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        NextToken(decoder).train()(batch).loss.backward()
    return counter.get_total_flops()


@torch.no_grad()
def cache_bytes_per_token(decoder: Decoder) -> int:
    """Bytes that the paged cache allocates per slot, over all layers."""
    cache = decoder.eval().new_paged_cache(tokens=64, sequences=1)
    decoder(torch.zeros(1, 2, dtype=torch.int64), cache=PagedView(cache, [cache.new_sequence()]))
    return sum(
        (store.k.nbytes + store.v.nbytes) // (store.pool.count * BLOCK) for store in cache.stores
    )


def most_allocated(
    config: DecoderConfig,
    train: TrainConfig,
    parallel: ParallelismConfig = UNDIVIDED,
    adapter: AdapterConfig | None = None,
) -> int:
    """Peak of PyTorch's CPU allocator in the second step, from the profiler's memory events."""
    step, batch = make_step(config, train, parallel, adapter), random_batch(config, train)
    held = sum(held_by(config, train, adapter).values())
    step.update(*step.backward(batch), schedule=1.0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.update(*step.backward(batch), schedule=1.0)
    results = profiler.profiler.kineto_results
    changes = [
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]"
    ]
    return held + max(accumulate(n_bytes for _, n_bytes in sorted(changes)))
