"""Passes that are recorded and called again are ordinary ones to the bit."""

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.native.machine import needs
from tests.nn.grid import CAUSAL, fixed_length, make
from tests.train.conftest import MODEL
from workhorse.data import IGNORE, Batch
from workhorse.errors import WorkhorseError
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
    monkeypatch.setattr(recorded_passes, "MAX_SECONDS", math.inf)


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
    for number, rows in enumerate(batches):
        loss, counted = step.backward(rows, number)
        of_pass = gradients(step)
        result = step.update(loss, counted, 1.0)
        weights = [one.detach().clone() for one in step.objective.parameters()]
        yield [result, *of_pass, *weights]


def gradients(step: TrainingStep) -> list[Tensor | None]:
    found = [one.grad for one in step.objective.parameters()]
    return [None if one is None else one.to_dense().clone() for one in found]


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
        if isinstance(step.recorded, recorded_passes.RecordedPasses) and not documents:
            assert all(step.recorded._recorded.values()), "each shape has its recording"
            assert step.recorded._recorded
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


def set_dropout(step: TrainingStep) -> None:
    for module in step.objective.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def freeze(step: TrainingStep) -> None:
    down_proj(step).weight.requires_grad_(requires_grad=False)


def put_another_weight(step: TrainingStep) -> None:
    down_proj(step).weight = nn.Parameter(down_proj(step).weight.detach() * 2)


def put_another_layer(step: TrainingStep) -> None:
    old = down_proj(step)
    new = nn.Linear(old.in_features, old.out_features)
    new.weight.data = old.weight.data * 3
    step.objective.set_submodule(DOWN, new)


def put_another_forward(step: TrainingStep) -> None:
    layer = down_proj(step)
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight)


def twice(x: Tensor) -> Tensor:
    return 2 * x if x.is_floating_point() else x


def turn_a_weight(step: TrainingStep) -> None:
    weight = down_proj(step).weight
    weight.data = weight.data.t().contiguous().t()


def down_proj(step: TrainingStep) -> nn.Linear:
    layer = step.objective.get_submodule(DOWN)
    assert isinstance(layer, nn.Linear)
    return layer


DOWN = "decoder.layers.0.feed_forward.down_proj"


@pytest.mark.parametrize(
    "change",
    [
        set_dropout,
        freeze,
        put_another_weight,
        put_another_layer,
        put_another_forward,
        lambda step: step.objective.eval(),
        lambda step: step.objective.decoder.eval(),
        lambda step: setattr(step.objective, "z_loss", 1.0),
        turn_a_weight,
        lambda _: torch.autocast("cpu", torch.bfloat16),
        lambda _: torch.autograd.graph.saved_tensors_hooks(torch.clone, twice),
    ],
)
def test_what_changes_is_noticed(change: Callable[[TrainingStep], Any]) -> None:
    step = make_step({**GPT, "dropout": 0.5})
    for rows in (batch(), batch(), batch()):
        step.backward(rows)
        step.forget()
    passes, context = step.recorded, change(step)
    with context if hasattr(context, "__enter__") else nullcontext():
        for rows in (batch(), batch(), batch()):
            found = []
            for recorded in (passes, None):
                torch.manual_seed(5)
                step.objective.zero_grad()
                step.recorded = recorded
                loss, counted = step.backward(rows)
                found.append([counted, loss, *gradients(step)])
            assert_equal(*found)


class _ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, above: Tensor) -> Tensor:
        return above * (1 if above.sum().item() > 0 else 2)


def test_a_recording_that_fails_midway_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient of the layers that it had passed, no random numbers drawn."""
    block = {**GPT, "dropout": 0.5}
    ours, other = make_step(block), plain(make_step(block))
    kind = type(ours.objective.get_submodule("decoder.embedding"))
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *given: _ReadsInBackward.apply(forward(*given)))
    batches, found = [batch() for _ in range(4)], []
    for step in (ours, other):
        torch.manual_seed(5)
        found.append(list(run(step, batches)))
    for some, more in zip(*found, strict=True):
        assert_equal(some, more)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("watch", [_Mode, torch.autograd.detect_anomaly])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_watches_operators_sees_them(
    watch: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(GPT)
    calls = count_forwards(step, monkeypatch)
    list(run(step, [batch() for _ in range(3)]))
    with watch():
        list(run(step, [batch() for _ in range(3)]))
    assert len(calls) == 2 + 3


def test_so_many_shapes_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_passes, "MAX_RECORDINGS", 2)
    ours, other = make_step(GPT), plain(make_step(GPT))
    calls = count_forwards(ours, monkeypatch)
    assert_same(ours, other, [batch(seq) for seq in (4, 5, 6, 7)] * 4)
    assert len(calls) == 2 + 2 + 4 + 4


def test_tokens_may_be_targets_once() -> None:
    ours, other = make_step(GPT), plain(make_step(GPT))
    first = [Batch(b.tokens, b.tokens, None, b.sources) for b in (batch(), batch())]
    assert_same(ours, other, [*first, batch(), batch()])


def test_a_wrong_token_is_told_as_ever() -> None:
    step = make_step(GPT)
    list(run(step, [batch() for _ in range(3)]))
    wrong = batch()
    wrong.tokens[0, 0] = 11
    with pytest.raises(WorkhorseError, match="token ids go from"):
        step.backward(wrong)


def test_numbers_of_another_type_are_read_as_such() -> None:
    ours, other = make_step(GPT), plain(make_step(GPT))
    narrow = [Batch(b.tokens.int(), b.targets, None, b.sources) for b in (batch(), batch())]
    assert_same(ours, other, [*(batch() for _ in range(3)), *narrow])


def test_a_copy_has_passes_of_its_own() -> None:
    step = make_step(GPT)
    batches = [batch() for _ in range(6)]
    list(run(step, batches[:3]))
    made = copy.deepcopy(step)
    assert_same(made, plain(copy.deepcopy(step)), batches[3:])


def test_no_compiler_is_imported() -> None:
    """By what records: it would take a second."""
    code = (
        "import sys; from tests.train.step.test_recorded_passes import *; step = make_step(GPT);"
        "recorded_passes.MAX_SECONDS = math.inf; list(run(step, [batch() for _ in range(3)]));"
        "assert step.recorded._recorded; assert not {'sympy', 'torch._dynamo'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_long_pass_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_passes, "MAX_SECONDS", 0)
    step = make_step(GPT)
    calls = count_forwards(step, monkeypatch)
    list(run(step, [batch() for _ in range(4)]))
    assert len(calls) == 4


def test_activations_that_are_computed_again_are_not_recorded() -> None:
    assert make_step(GPT, activation_checkpointing=True).recorded is None
