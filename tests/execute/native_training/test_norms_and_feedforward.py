"""Native norms and feed-forwards in a model have the outputs and gradients of PyTorch's."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.native.machine import TRAINING, needs
from tests.train.conftest import MODEL
from workhorse.execute.lower.train import train_natively
from workhorse.execute.native_training.norms import NativeNorm
from workhorse.execute.native_training.vocabulary import replace_logprobs
from workhorse.execute.training import checkpoint_activations
from workhorse.native import Operators
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.feedforward import ClampedSwiglu, Gated, GatedMlp, Mlp
from workhorse.nn.logprobs import HeadLoss, Shaping, score
from workhorse.nn.norms import LayerNorm, RMSNorm, RMSNormConfig, RMSNormMultipliedFirst
from workhorse.nn.products import product
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.step.build import build_step

GPT: dict[str, Any] = {
    "kind": "pre_norm",
    "norm": {"kind": "layer_norm"},
    "attention": {"n_heads": 2, "qkv_bias": True, "out_bias": True},
    "feed_forward": {"kind": "mlp", "d_ff": 40, "bias": True},
}
QWEN: dict[str, Any] = {
    "kind": "sandwich_norm",
    "norm": {"kind": "rms_norm", "offset": True},
    "attention": {"n_heads": 2, "n_kv_heads": 1, "qk_norm": {"norm": {"kind": "rms_norm"}}},
    "feed_forward": {"kind": "gated_mlp", "d_ff": 24, "activation": "gelu_tanh"},
}
MIXTURE: dict[str, Any] = {
    "kind": "pre_norm",
    "norm": {"kind": "rms_norm", "multiply": "before_cast"},
    "attention": {"n_heads": 2},
    # All experts are chosen: at a router's near tie, two roundings could choose different ones.
    "feed_forward": {"kind": "moe", "n_experts": 4, "top_k": 4, "d_ff": 16},
}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: LayerNorm(24),
    "bare": lambda: LayerNorm(24, weight=False, bias=False),
    "rms": lambda: RMSNorm(24),
    "offset": lambda: RMSNormMultipliedFirst(24, offset=True),
}
KINDS_OF_NORM: dict[str, dict[str, Any]] = {
    f"{kind} {option}": {"kind": f"{kind}_norm", field: option}
    for kind, field, options in (
        ("layer", "precision", ("native", "float32", "low")),
        ("rms", "multiply", ("after_cast", "before_cast")),
    )
    for option in options
}
FEED_FORWARDS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: Mlp(24, 37, bias=True),
    "gated": lambda: GatedMlp(24, 37, activation=Gated("relu2"), bias=True),
    "without bias": lambda: GatedMlp(24, 37, activation=Gated("silu")),
}


def speed_up(module: nn.Module) -> nn.Module:
    """Use native operators except for linear layers."""
    return train_natively(module, Operators(training=TRAINING))


def build(block: dict[str, Any]) -> Decoder:
    shape = {**MODEL, "vocab_size": 11, "max_seq_len": 8, "blocks": {"main": block}}
    return DecoderConfig.from_dict(shape).build()


def results(module: nn.Module, *given: Tensor) -> list[Tensor]:
    """The output, and the gradients of inputs and weights, for one gradient of the output."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    module.zero_grad()
    y = module(*leaves)
    above = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    y.backward(above.to(y.dtype))
    tensors = [y.detach(), *(x.grad for x in leaves), *(p.grad for p in module.parameters())]
    return [x for x in tensors if x is not None]


def assert_as_good(module: nn.Module, *given: Tensor) -> None:
    """Check that the distance from float64 is at most twice PyTorch's in the same dtype, or 1 %."""
    native, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    native = speed_up(native)
    wide = [x.double() if x.is_floating_point() else x for x in given]
    rows = zip(results(exact, *wide), results(module, *given), results(native, *given), strict=True)
    for expected, plain, ours in rows:
        assert ours.dtype == plain.dtype
        allowed = max(2 * (plain - expected).norm(), 0.01 * expected.norm())
        assert (ours - expected).norm() <= allowed


@pytest.mark.parametrize("name", NORMS | FEED_FORWARDS)
@pytest.mark.parametrize("layout", ["rows", "heads", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs("training")
def test_parts(name: str, layout: str, dtype: torch.dtype) -> None:
    module = (NORMS | FEED_FORWARDS)[name]().to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(3, 5, 48).to(dtype)
    x = {"rows": x[..., :24].contiguous(), "heads": x[..., :24].transpose(0, 1)}.get(
        layout, x[..., ::2]
    )
    assert_as_good(module, x)


class Half(nn.Module):
    """Replaces attention and feed-forward; exact in any dtype."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return x * 0.5


def equal_share(one: Tensor, other: Tensor) -> float:
    return (one == other).double().mean().item()


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("name", KINDS_OF_NORM)
@needs("training")
def test_a_norm_rounds_where_its_options_say(name: str, offset: bool) -> None:
    """Another order of sums changes one rounding in thousands, another option one in five."""
    norm = {**KINDS_OF_NORM[name], "offset": offset}
    block: dict[str, Any] = {**GPT, "norm": norm}
    made = build(block).layers[0]
    made.attention = made.feed_forward = Half()
    for parameter in made.parameters():
        nn.init.normal_(parameter, mean=1.0, std=0.3)
    made.bfloat16()
    x = torch.randn(64, 8, made.attention_norm.weight.numel()).bfloat16()
    plain = made.attention_norm(x), made(x, None)
    made = speed_up(made)
    for ours, expected in zip((made.attention_norm(x), made(x, None)), plain, strict=True):
        assert equal_share(ours, expected) > 0.99
    if name.startswith("rms"):
        other = copy.deepcopy(norm)
        other["multiply"] = "before_cast" if "after" in name else "after_cast"
        changed = build({**GPT, "norm": other}).bfloat16().layers[0]
        changed.attention_norm.load_state_dict(made.attention_norm.state_dict())
        assert equal_share(changed.attention_norm(x), plain[0]) < 0.9


@needs("training")
def test_a_norm_of_somebody_else_is_left_alone() -> None:
    class Doubled(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    module, x = Doubled(8), torch.randn(3, 8)
    expected = module(x)
    module = speed_up(module)
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("block", [GPT, QWEN, MIXTURE], ids=["gpt", "qwen", "mixture"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs("training")
def test_whole_models(block: dict[str, Any], dtype: torch.dtype) -> None:
    decoder = build(block).to(dtype)
    native = copy.deepcopy(decoder)
    native = speed_up(native)
    assert [n for n, _ in native.named_parameters()] == [n for n, _ in decoder.named_parameters()]
    tokens = torch.randint(11, (3, 8))
    plain, ours = ([x.double() for x in results(m, tokens)] for m in (decoder, native))
    # Roundings differ; a dozen of them happen between a weight and the logits, and back.
    unit = 24 * torch.finfo(dtype).eps
    assert (ours[0] - plain[0]).norm() <= unit * plain[0].norm()
    gradients = [torch.cat([x.flatten() for x in some[1:]]) for some in (plain, ours)]
    assert (gradients[1] - gradients[0]).norm() <= unit * gradients[0].norm()


@needs("training")
def test_activations_computed_again_give_the_same_gradients() -> None:
    decoder = build(GPT).bfloat16()
    again = copy.deepcopy(decoder)
    for module in (decoder, again):
        speed_up(module)
    checkpoint_activations(again)
    tokens = torch.randint(11, (2, 8))
    assert all(map(torch.equal, results(decoder, tokens), results(again, tokens)))


@needs("training")
def test_a_feed_forward_keeps_what_goes_into_its_activation_only() -> None:
    module = Mlp(16, 64).bfloat16()
    module = speed_up(module)
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        module(torch.randn(10, 16).bfloat16())
    weights = {p.data_ptr() for p in module.parameters()}
    assert sum(x.numel() for x in kept if x.data_ptr() not in weights) == 10 * (16 + 64)


@pytest.mark.parametrize(
    "why", ["dropout", "learned", "another product", "float64", "clamped", "a norm"]
)
@needs("training")
def test_what_the_operators_cannot_do_pytorch_does(why: str) -> None:
    module: nn.Module = Mlp(8, 12, dropout=0.5 if why == "dropout" else 0.0)
    if why == "learned":
        module = Mlp(8, 12, activation="xielu")
    if why == "clamped":
        module = GatedMlp(8, 12, activation=ClampedSwiglu())
    if why == "a norm":
        module = GatedMlp(8, 12, inner_norm=RMSNormConfig())
    if why == "another product":
        module.down_proj = nn.Sequential(module.down_proj)
    types = {"float64": torch.float64, "a norm": torch.float32}  # its gate is an operator's
    module.to(types.get(why, torch.bfloat16))
    x = torch.randn(4, 8).to(next(module.parameters()).dtype)
    expected = copy.deepcopy(module)
    module = speed_up(module)
    outcomes = []
    for part in (expected, module):
        torch.manual_seed(0)
        outcomes.append(results(part, x))
    for plain, ours in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2**-6, atol=2**-8)


@needs("training")
def test_a_capped_loss_is_computed_by_pytorch() -> None:
    logits, targets, capped = torch.randn(6, 9), torch.randint(9, (6,)), Shaping(cap=2.0)
    ours, plain = logits.clone(), logits.clone()
    native = replace_logprobs(HeadLoss(), product, TRAINING)
    by = torch.randn(6, 4)
    terms = native.score(ours, targets, by, capped)
    assert torch.equal(terms, score(plain, targets, by, shaping=capped))
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@needs("training")
def test_a_step_is_native_unless_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, dtype: str, native: bool
) -> None:
    if not native:
        monkeypatch.setenv("WORKHORSE_NATIVE", "0")
    decoder = build(GPT)
    config = TrainConfig(steps=1, batch_size=2, seq_len=8, dtype=dtype)
    step = build_step(decoder, config, torch.device("cpu"))
    assert isinstance(step.objective.decoder.final_norm, NativeNorm) is native
    assert type(decoder.final_norm) is not NativeNorm
    assert (step.objective.logprobs.operators is not None) is native
