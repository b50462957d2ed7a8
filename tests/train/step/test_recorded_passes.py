"""Passes that are recorded and called again are ordinary ones to the bit."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.native.machine import needs
from tests.nn.grid import CAUSAL, fixed_length, make
from tests.train.conftest import MODEL
from workhorse.data import IGNORE, Batch
from workhorse.nn import DecoderConfig
from workhorse.train.recipe.recipe import TrainConfig
from workhorse.train.step import recorded_passes
from workhorse.train.step.build import build_step
from workhorse.train.step.step import TrainingStep

pytestmark = needs("replay")

CPU = torch.device("cpu")
GPT: dict[str, Any] = {
    "kind": "pre_norm",
    "norm": {"kind": "layer_norm"},
    "attention": {"n_heads": 2, "qkv_bias": True},
    "feed_forward": {"kind": "mlp", "d_ff": 40, "bias": True},
}
LLAMA: dict[str, Any] = {
    "kind": "pre_norm",
    "norm": {"kind": "rms_norm"},
    "attention": {"n_heads": 4, "n_kv_heads": 2, "position": {"kind": "rope"}},
    "feed_forward": {"kind": "gated_mlp", "d_ff": 37},
}
WINDOW: dict[str, Any] = {
    **LLAMA,
    "attention": {**LLAMA["attention"], "window": 3},
}
MODELS = {"gpt": GPT, "llama": LLAMA, "window": WINDOW}


@pytest.fixture(autouse=True)
def _any_pass_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_passes, "SHORT", math.inf)


def make_step(block: dict[str, Any], *, tied: bool = True, **changes: Any) -> TrainingStep:
    torch.manual_seed(1)
    config = DecoderConfig.from_dict(
        {
            **MODEL,
            "vocab_size": 11,
            "max_seq_len": 8,
            "blocks": {"main": block},
            "head": {"tied": tied},
        }
    )
    train = {"batch_size": 4, "steps": 9, "seq_len": 8, **changes}
    return build_step(config.build(), TrainConfig.from_dict(train), CPU)


def plain(step: TrainingStep) -> TrainingStep:
    step.recorded = None
    return step


def batch(seq: int = 8, *, documents: bool = False) -> Batch:
    tokens, targets = torch.randint(11, (2, 4, seq))
    targets[0, : torch.randint(seq, ())] = IGNORE
    numbers = torch.randint(2, (4, seq)).cumsum(1) if documents else None
    return Batch(tokens, targets, numbers, torch.zeros(4, dtype=torch.int64))


def run(step: TrainingStep, batches: list[Batch]) -> Iterator[list[Any]]:
    """Loss, gradients and weights of every step."""
    parameters = list(step.objective.parameters())
    for number, rows in enumerate(batches):
        loss, counted = step.backward(rows, number)
        gradients = [None if one.grad is None else one.grad.to_dense() for one in parameters]
        gradients = [None if one is None else one.clone() for one in gradients]
        result = step.update(loss, counted, 1.0)
        yield [result, *gradients, *(one.detach().clone() for one in parameters)]


def assert_same(ours: TrainingStep, other: TrainingStep, batches: list[Batch]) -> None:
    for some, more in zip(run(ours, batches), run(other, batches), strict=True):
        assert_equal(some, more)


def assert_equal(some: list[Any], more: list[Any]) -> None:
    assert some[0] == more[0]
    for one, another in zip(some[1:], more[1:], strict=True):
        assert one is another is None or torch.equal(one, another)


def count_forwards(step: TrainingStep, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which each call of the objective adds one."""
    calls: list[int] = []
    kind = type(step.objective)
    forward = kind.forward

    def counted(self: Any, rows: Any) -> Any:
        if self is step.objective:
            calls.append(len(rows))
        return forward(self, rows)

    monkeypatch.setattr(kind, "forward", counted)
    return calls


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_steps_are_those_of_autograd(
    model: str, dtype: str, *, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "tied": documents, "z_loss": 1e-3, "grad_clip": 0.5}
    ours, other = (make_step(MODELS[model], **options) for _ in range(2))
    calls = count_forwards(ours, monkeypatch)
    assert_same(ours, plain(other), [batch(documents=documents) for _ in range(5)])
    assert len(calls) == 2, "one ordinary, one recorded"


@pytest.mark.parametrize("number", range(len(CAUSAL)))
def test_steps_of_any_model_are_those_of_autograd(number: int) -> None:
    """Whether its passes can be recorded, or that is found midway."""
    config = CAUSAL[number]
    dtype = ("float32", "bfloat16")[number % 2]
    train = TrainConfig.from_dict({"batch_size": 4, "steps": 9, "seq_len": 8, "dtype": dtype})
    seq, documents = fixed_length(config) or 8, number % 3 == 0
    batches = [batch(seq, documents=documents) for _ in range(4)]
    found = []
    for recorded in (True, False):
        torch.manual_seed(1)
        step = build_step(make(config), train, CPU)
        found.append(list(run(step if recorded else plain(step), batches)))
    for some, more in zip(*found, strict=True):
        assert_equal(some, more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_micro_batches_have_a_recording_for_each_shape(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = (make_step(LLAMA, micro_batch_size=3, dtype=dtype) for _ in range(2))
    calls = count_forwards(ours, monkeypatch)
    assert_same(ours, plain(other), [batch() for _ in range(4)])
    # Float32 gradients are added up where they are, so a pass is recorded if it is a step's first.
    assert calls.count(3) == 2
    assert calls.count(1) == {"float32": 4, "bfloat16": 2}[dtype]


def test_random_numbers_are_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    block = {**GPT, "dropout": 0.2}
    ours, other = make_step(block), plain(make_step(block))
    calls = count_forwards(ours, monkeypatch)
    for rows in [batch() for _ in range(4)]:
        results = []
        for step in (ours, other):
            torch.manual_seed(5)
            results.append(next(run(step, [rows]))[0])
        assert results[0] == results[1]
    assert len(calls) == 2


@pytest.mark.parametrize("kind", ["module", "gradient", "everywhere"])
def test_hooks_are_called_at_every_pass(kind: str) -> None:
    step, seen = make_step(GPT), []
    weight = next(step.objective.parameters())
    rows = batch()
    for _ in range(3):
        step.backward(rows)
        step.forget()
    if kind == "module":
        hook = next(step.objective.modules()).register_forward_hook(lambda *_: seen.append(1))
    elif kind == "gradient":
        hook = weight.register_post_accumulate_grad_hook(lambda _: seen.append(1))
    else:
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, *_: seen.append(1) if module is step.objective else None
        )
    for _ in range(3):
        step.backward(rows)
        step.forget()
    hook.remove()
    assert len(seen) == 3
    for _ in range(3):
        step.backward(rows)
        step.forget()
    assert len(seen) == 3


def test_what_was_changed_is_not_called_as_it_was() -> None:
    """A frozen weight, another weight in its place, another layer."""
    step, rows = make_step(GPT), batch()
    layer = step.objective.get_submodule("decoder.layers.0.feed_forward.down_proj")

    def gradient() -> Tensor | None:
        for _ in range(3):
            step.backward(rows)
            found = layer.weight.grad
            step.objective.zero_grad()
        return found

    first = gradient()
    assert first is not None
    layer.weight.requires_grad_(requires_grad=False)
    assert gradient() is None
    layer.weight.requires_grad_()
    assert torch.equal(gradient(), first)
    layer.weight = nn.Parameter(layer.weight.detach() * 2)
    other = gradient()
    assert other is not None
    assert not torch.equal(other, first)
    step.objective.eval()
    assert gradient() is not None


def test_a_long_pass_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_passes, "SHORT", 0)
    step = make_step(GPT)
    calls = count_forwards(step, monkeypatch)
    list(run(step, [batch() for _ in range(4)]))
    assert len(calls) == 4


def test_activations_that_are_computed_again_are_not_recorded() -> None:
    assert make_step(GPT, activation_checkpointing=True).recorded is None
