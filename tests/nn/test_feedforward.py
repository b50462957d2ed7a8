"""Feed-forward layers and activations compared with transformers and float64."""

from typing import get_args

import pytest
import torch

from workhorse.models.huggingface.llama_like import WRITTEN_ACTIVATIONS
from workhorse.nn.feedforward import (
    ActivationName,
    ClampedGatedMlpConfig,
    GatedMlpConfig,
    MlpConfig,
    make_activation,
)
from workhorse.nn.norms import RMSNormConfig


@pytest.mark.filterwarnings("ignore")  # transformers warns of a CUDA package that xIELU may use
@pytest.mark.parametrize("name", get_args(ActivationName))
def test_activations_equal_the_reference(name: ActivationName) -> None:
    needed = f"add transformers' name of {name} to ACTIVATIONS in llama_like.py"
    assert name in WRITTEN_ACTIVATIONS, needed
    activations = pytest.importorskip("transformers.activations")
    theirs = activations.ACT2FN[WRITTEN_ACTIVATIONS[name]].float()
    ours = make_activation(name)
    x = torch.linspace(-8, 8, 401)
    tolerance = 2e-2 if name == "xielu" else 1e-6  # transformers stores the weights in bfloat16
    assert torch.allclose(ours(x), theirs(x).float(), atol=tolerance, rtol=1e-2)


def test_xielu_is_its_formula() -> None:
    """2411.13010: `a_p x² + b x` above zero, `(e^x - 1 - x) a_n + b x` below."""
    module = make_activation("xielu")
    module.alpha_p.data.fill_(0.3)
    module.alpha_n.data.fill_(-0.4)
    x = torch.linspace(-5, 5, 101).double()
    a_p = torch.tensor(0.3).double().exp().log1p()
    a_n = 0.5 + torch.tensor(-0.4).double().exp().log1p()
    expected = torch.where(x > 0, a_p * x**2 + 0.5 * x, (x.expm1() - x) * a_n + 0.5 * x)
    assert torch.allclose(module(x.float()).double(), expected, atol=1e-5)


def test_a_fresh_xielu_has_both_slopes_at_0_8() -> None:
    module = make_activation("xielu")
    softplus = torch.nn.functional.softplus
    assert softplus(module.alpha_p).item() == pytest.approx(0.8, abs=1e-6)
    assert 0.5 + softplus(module.alpha_n).item() == pytest.approx(0.8, abs=1e-6)


def test_gelu_forms_differ() -> None:
    x = torch.linspace(-3, 3, 61)
    exact, tanh = make_activation("gelu")(x), make_activation("gelu_tanh")(x)
    normal = torch.distributions.Normal(0.0, 1.0)
    assert torch.allclose(exact, x * normal.cdf(x), atol=1e-6)
    assert 1e-5 < (exact - tanh).abs().max() < 1e-3


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter)
    return module


def test_the_three_kinds_are_their_formulas() -> None:
    x = torch.randn(2, 3, 6)
    mlp = randomised(MlpConfig(d_ff=10, activation="relu", bias=True).build(6))
    up = x @ mlp.up_proj.weight.T + mlp.up_proj.bias
    expected = up.clamp(min=0) @ mlp.down_proj.weight.T + mlp.down_proj.bias
    assert torch.allclose(mlp(x), expected, atol=1e-4)

    gated = randomised(GatedMlpConfig(d_ff=10, activation="sigmoid").build(6))
    gate = torch.sigmoid(x @ gated.gate_proj.weight.T)
    expected = (gate * (x @ gated.up_proj.weight.T)) @ gated.down_proj.weight.T
    assert torch.allclose(gated(x), expected, atol=1e-4)

    clamped = randomised(ClampedGatedMlpConfig(d_ff=10, limit=1.5, alpha=1.7).build(6))
    g = (x @ clamped.gate_proj.weight.T + clamped.gate_proj.bias).clamp(max=1.5)
    u = (x @ clamped.up_proj.weight.T + clamped.up_proj.bias).clamp(-1.5, 1.5)
    expected = g * torch.sigmoid(1.7 * g) * (u + 1)
    expected = expected @ clamped.down_proj.weight.T + clamped.down_proj.bias
    assert torch.allclose(clamped(x), expected, atol=1e-4)


@pytest.mark.parametrize("config", [MlpConfig(d_ff=10), GatedMlpConfig(d_ff=10)])
def test_the_inner_norm_comes_before_the_projection_down(
    config: MlpConfig | GatedMlpConfig,
) -> None:
    normed = randomised(config.replace(inner_norm=RMSNormConfig(eps=1e-3)).build(6))
    plain = config.build(6)
    plain.load_state_dict(normed.state_dict(), strict=False)
    plain.down_proj = normed.down_proj = torch.nn.Identity()
    x = torch.randn(2, 3, 6)
    y = plain(x)
    expected = y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * normed.inner_norm.weight
    assert torch.allclose(normed(x), expected, atol=1e-5)


@pytest.mark.parametrize(
    "config", [MlpConfig(d_ff=64, dropout=0.5), GatedMlpConfig(d_ff=64, dropout=0.5)]
)
def test_dropout_acts_in_training_only(config: MlpConfig | GatedMlpConfig) -> None:
    module = randomised(config.build(8))
    x = torch.randn(1, 4, 8)
    assert torch.equal(module.eval()(x), module.eval()(x))
    assert not torch.allclose(module.train()(x), module.eval()(x))
