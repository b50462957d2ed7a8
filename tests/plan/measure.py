"""What a training step really does, measured without the code that predicts it."""

from collections import Counter
from itertools import accumulate

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from workhorse.data import Batch
from workhorse.nn import DecoderConfig, HeadLoss
from workhorse.train.recipe.recipe import TrainConfig
from workhorse.train.step.build import build_step
from workhorse.train.step.step import TrainingStep

CPU = torch.device("cpu")


def random_batch(config: DecoderConfig, train: TrainConfig) -> Batch:
    rows, seq = train.batch_size, train.seq_len
    tokens = torch.randint(config.vocab_size, (rows, seq))
    return Batch(tokens, tokens, None, torch.zeros(rows, dtype=torch.int64))


def make_step(config: DecoderConfig, train: TrainConfig) -> TrainingStep:
    torch.manual_seed(0)
    return build_step(config.build(train.kernel), train, CPU)


def kept_by_autograd(config: DecoderConfig, train: TrainConfig) -> Counter[str]:
    """Bytes that each layer is the first to save for the backward pass, and `head` the loss.

    By saved-tensor hooks, each storage once; weights and the batch itself do not count.
    """
    step, batch = make_step(config, train), random_batch(config, train)
    own = {
        tensor.untyped_storage()._cdata
        for tensor in (*step.objective.parameters(), *step.objective.buffers(), batch.tokens)
    }
    kept: Counter[str] = Counter()
    alive: list[Tensor] = []  # or a storage could be at the place of another
    part = ["embedding"]

    def enter(label: str):
        return lambda *_: part.__setitem__(0, label)

    (decoder,) = (m for m in step.objective.modules() if hasattr(m, "max_positions"))
    for name, layer in decoder.layers.named_children():
        layer.register_forward_pre_hook(enter(f"layers.{name}"))
    layer.register_forward_hook(enter("final_norm"))
    (loss,) = (m for m in step.objective.modules() if isinstance(m, HeadLoss))

    hidden: list[int] = []

    def enter_head(_: object, inputs: tuple[Tensor, ...]) -> None:
        hidden.append(inputs[0].untyped_storage()._cdata)
        part[0] = "head"

    loss.register_forward_pre_hook(enter_head)

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            own.add(storage._cdata)
            alive.append(tensor)
            # What the layers made and only the loss keeps is still theirs.
            kept["final_norm" if storage._cdata in hidden else part[0]] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step.objective(batch)
    return kept


def held_by(config: DecoderConfig, train: TrainConfig) -> dict[str, int]:
    """Bytes of the tensors that a step has between steps."""
    step = make_step(config, train)
    tensors = {
        "weights": [*step.objective.parameters(), *step.objective.buffers()],
        "low_bits": step.optimizer.masters.low_bits.values(),
        "optimizer": step.optimizer.tensors().values(),
    }
    counted = {kind: sum(one.nbytes for one in some) for kind, some in tensors.items()}
    return {kind: n_bytes for kind, n_bytes in counted.items() if n_bytes}


def gradient_bytes(config: DecoderConfig, train: TrainConfig) -> int:
    """Bytes of the gradients after the passes of a step; a sparse one's are its rows."""
    step = make_step(config, train)
    step.backward(random_batch(config, train))
    found = [one.grad for one in step.objective.parameters() if one.grad is not None]
    return sum((one._values() if one.is_sparse else one).nbytes for one in found)


def most_allocated(config: DecoderConfig, train: TrainConfig) -> int:
    """The peak of PyTorch's CPU allocator in the second step, by its own record of allocations."""
    step, batch = make_step(config, train), random_batch(config, train)
    held = sum(held_by(config, train).values())
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
