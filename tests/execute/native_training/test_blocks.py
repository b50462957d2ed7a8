"""Blocks that follow a plan of native calls give the bits of their modules called one by one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.native.machine import TRAINING, VECTORS, needs
from tests.train.conftest import MODEL
from workhorse.execute.lower.train import Planned, train_natively
from workhorse.execute.training import checkpoint_activations
from workhorse.native import Operators
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.blocks import Block
from workhorse.nn.norms import Norm

pytestmark = [needs("training"), needs("vectors")]

DTYPES = [torch.bfloat16, torch.float32]
BLOCKS: dict[str, dict[str, Any]] = {
    "gpt": {
        "norm": {"kind": "layer_norm"},
        "attention": {"n_heads": 2, "qkv_bias": True, "out_bias": True},
        "feed_forward": {"kind": "mlp", "d_ff": 40, "bias": True},
    },
    "llama": {
        "norm": {"kind": "rms_norm"},
        "attention": {"n_heads": 4, "n_kv_heads": 2, "position": {"kind": "rope"}},
        "feed_forward": {"kind": "gated_mlp", "d_ff": 37},
    },
    "gemma": {
        "norm": {"kind": "rms_norm", "offset": True, "multiply": "before_cast"},
        "attention": {"n_heads": 2, "qk_norm": {"norm": {"kind": "rms_norm"}}},
        "feed_forward": {"kind": "gated_mlp", "d_ff": 24, "activation": "gelu_tanh"},
    },
}


WIRINGS: dict[str, dict[str, Any]] = {
    "pre": {},
    "normed residual": {"norm_residual": True},
    **{kind: {"kind": f"{kind}_norm"} for kind in ("post", "reordered", "sandwich")},
    "parallel": {"kind": "parallel"},
    "parallel, two norms": {"kind": "parallel", "norms": 2},
}
CALLED: dict[str, set[str]] = {
    "pre": set(),
    "normed residual": set(),
    "post": {"feed_forward_norm"},
    "reordered": {"attention.out_proj", "attention_norm", "feed_forward_norm"},
    "sandwich": {"attention.out_proj", "attention_output_norm", "feed_forward_output_norm"},
    "parallel": {"attention.out_proj"},
    "parallel, two norms": {"attention.out_proj"},
}
"""For each wiring, its norms and linear layers that are no part of a larger native call."""


def build(name: str, dtype: torch.dtype, **block: Any) -> Decoder:
    """A decoder with random weights in all parameters."""
    blocks = {"main": {"kind": "pre_norm", **BLOCKS[name], **block}}
    decoder = DecoderConfig.from_dict(
        {**MODEL, "vocab_size": 11, "max_seq_len": 52, "blocks": blocks}
    ).build()
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    return decoder.to(dtype)


def natively(decoder: Decoder) -> Decoder:
    return train_natively(copy.deepcopy(decoder), Operators(training=TRAINING, vectors=VECTORS))


def apart(decoder: Decoder) -> Decoder:
    """The same decoder, but its blocks call their norms, attention, feed-forward and sums."""
    made = copy.deepcopy(decoder)
    for module in made.modules():
        if isinstance(module, Planned) and isinstance(module, Block):
            module.plan = None
    return made


def results(decoder: Decoder, rows: int = 5) -> list[Tensor]:
    """The output, and the gradients of all weights."""
    tokens = torch.arange(rows * 52).view(rows, 52) * 7 % 11
    decoder.zero_grad()
    y = decoder(tokens)
    above = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    y.backward(above.to(y.dtype))
    return [y.detach(), *(p.grad for p in decoder.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("name", BLOCKS)
def test_bits_are_those_of_the_modules_one_by_one(
    name: str, wiring: str, dtype: torch.dtype
) -> None:
    native = natively(build(name, dtype, **WIRINGS[wiring]))
    assert all(isinstance(layer, Planned) and layer.plan for layer in native.layers)
    together, one_by_one = results(native), results(apart(native))
    if wiring != "parallel":
        assert all(map(torch.equal, together, one_by_one))
        return
    # The gradients of all projections of the norm are one sum, not two that are added.
    assert torch.equal(together[0], one_by_one[0])
    ours, other = (
        torch.cat([x.double().flatten() for x in some]) for some in (together, one_by_one)
    )
    assert (ours - other).norm() <= 4 * torch.finfo(dtype).eps * other.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("name", BLOCKS)
def test_results_and_gradients_are_pytorchs(name: str, wiring: str, dtype: torch.dtype) -> None:
    """The distance from float64 is at most twice PyTorch's in the same dtype."""
    plain = build(name, dtype, **WIRINGS[wiring])
    exact, expected, ours = (
        torch.cat([x.double().flatten() for x in results(decoder)])
        for decoder in (copy.deepcopy(plain).double(), plain, natively(plain))
    )
    assert (ours - exact).norm() <= 2 * (expected - exact).norm()


@pytest.mark.parametrize("wiring", WIRINGS)
def test_only_few_modules_of_a_wiring_are_called(wiring: str) -> None:
    (block, *_) = natively(build("llama", torch.float32, **WIRINGS[wiring])).layers
    assert isinstance(block, Planned)
    computed = set(block.computed())
    called = {
        path
        for path, module in block.named_modules()
        if isinstance(module, Norm | nn.Linear) and module not in computed
    }
    assert called == CALLED[wiring]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    (block, *_) = natively(build("gpt", dtype)).layers
    x = torch.randn(3, 52, MODEL["d_model"]).to(dtype).requires_grad_()

    def gradients() -> list[Tensor]:
        y = block(x)
        return [y.detach(), *torch.autograd.grad(y, (x, *block.parameters()), y.detach())]

    expected, before = gradients(), torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, gradients(), expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_do_not_depend_on_others(rows: int) -> None:
    native = natively(build("llama", DTYPES[-1]))
    assert torch.equal(results(native, rows)[0], results(native)[0][:rows])


def test_activations_computed_again_give_the_same_gradients() -> None:
    native = natively(build("gpt", torch.float32))
    expected = results(native)
    checkpoint_activations(native)
    assert all(map(torch.equal, results(native), expected))


def test_frozen_weights_get_no_gradient_and_leave_the_others_theirs() -> None:
    native = natively(build("llama", torch.float32))
    named = dict(native.named_parameters())
    results(native)
    expected = {name: weight.grad.clone() for name, weight in named.items()}
    frozen = [name for name in named if "k_proj" in name or "down_proj" in name or "norm" in name]
    for name in frozen:
        named[name].requires_grad_(False).grad = None
    results(native)
    for name, weight in named.items():
        assert (weight.grad is None) == (name in frozen)
        assert name in frozen or torch.equal(weight.grad, expected[name])


@pytest.mark.parametrize(
    "why", ["dropout", "a multiplier", "a gate", "an inner norm", "a hook", "another linear layer"]
)
def test_what_the_passes_do_not_know_is_computed_one_by_one(why: str) -> None:
    own: dict[str, dict[str, Any]] = {
        "a multiplier": {"residual_multiplier": 0.5},
        "a gate": {"attention": {"n_heads": 2, "output_gate": True}},
        "an inner norm": {"attention": {"n_heads": 2, "inner_norm": {"kind": "rms_norm"}}},
        "dropout": {"dropout": 0.5},
    }
    native = natively(build("gpt", torch.float32, **own.get(why, {})))
    (first, *_) = native.layers
    seen: list[object] = []
    if why == "a hook":
        first.attention.q_proj.register_forward_hook(lambda *given: seen.append(given))
    if why == "another linear layer":
        first.attention.k_proj = nn.Sequential(first.attention.k_proj)
    torch.manual_seed(0)
    ours = results(native)
    torch.manual_seed(0)
    assert all(map(torch.equal, ours, results(apart(native))))
    assert bool(seen) == (why == "a hook")


@pytest.mark.parametrize("name", ["attention", "feed_forward"])
@pytest.mark.parametrize("part", ["norm", "output_norm", "sum"])
def test_a_module_with_two_names_can_be_replaced_under_one(part: str, name: str) -> None:
    plain = build("gpt", torch.float32, **WIRINGS["sandwich"])
    for layer in plain.layers:
        setattr(layer, f"feed_forward_{part}", layer.get_submodule(f"attention_{part}"))
    native = natively(plain)
    other = Difference() if part == "sum" else nn.LayerNorm(MODEL["d_model"])
    for decoder in (plain, native):
        setattr(decoder.layers[0], f"{name}_{part}", other)
    torch.testing.assert_close(results(native)[0], results(plain)[0], atol=1e-5, rtol=1e-5)


class Difference(nn.Module):
    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return x - branch


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda weight: weight.t().contiguous().t(),
    "every second number": lambda weight: torch.stack([weight] * 2, dim=-1)[..., 0],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name", ["attention.q_proj", "attention.out_proj", "feed_forward.down_proj"]
)
def test_weights_may_lie_in_memory_in_any_order(name: str, order: str) -> None:
    native = natively(build("gpt", torch.float32))
    before = torch.cat([one.flatten() for one in results(native)])
    weight = native.layers[0].get_submodule(name).weight
    weight.data = ORDERS[order](weight.data)
    after = torch.cat([one.flatten() for one in results(native)])
    assert (after - before).norm() <= 1e-5 * before.norm()  # a gradient by itself may be nearly 0


def test_a_second_derivative_is_refused() -> None:
    decoder = natively(build("llama", torch.float32))
    weight = decoder.layers[0].attention.q_proj.weight
    y = decoder(torch.arange(8)[None] % 11)
    (gradient,) = torch.autograd.grad(y.pow(2).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.pow(2).sum().backward()
