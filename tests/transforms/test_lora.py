"""Low-rank adapters of single layers, against their formulas and against PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from tests.parity.reference import VOCAB, make, quiet
from workhorse.config.base import ConfigError
from workhorse.nn.experts.mixture import GroupedLinear, group_sorted
from workhorse.nn.experts.router import Float32Linear
from workhorse.nn.surgery import as_subclass
from workhorse.transforms.adapters import adapter_parameters, add_adapter
from workhorse.transforms.lora import (
    ADAPTED,
    Adapted,
    LoraConfig,
    LoraGroupedLinear,
    LoraLinear,
    merged_weight,
)
from workhorse.transforms.quantization import QuantizedGroupedLinear, QuantizedLinear

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 3, "alpha": 5},
    "rslora": {"rank": 3, "alpha": 5, "scaling": "sqrt_rank"},
    "dora": {"rank": 3, "alpha": 5, "dora": True},
}
SCALES = {"lora": 5 / 3, "rslora": 5 / 3**0.5, "dora": 5 / 3}


def adapted(layer: nn.Module, config: LoraConfig, dtype: torch.dtype = torch.float64) -> Adapted:
    """A layer with an adapter whose A and B are random; DoRA's magnitudes are not the norms."""
    made = as_subclass(layer, ADAPTED[type(layer)], adapters=nn.ModuleDict(), active="default")
    in_float32 = isinstance(layer, Float32Linear)
    made.adapters["default"] = adapter = config.build(made.weight_shape, in_float32=in_float32)
    adapter.to(dtype)
    generator = torch.Generator().manual_seed(1)
    adapter.reset(made, generator)
    with torch.no_grad():
        adapter.lora_b.weight.normal_(generator=generator)
        if config.dora:
            adapter.magnitude.mul_(1 + torch.rand(adapter.magnitude.shape, generator=generator))
    return made.requires_grad_(False)


def expected(kind: str, layer: Adapted, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The weight with the update, from the papers' formulas."""
    total = weight + SCALES[kind] * b @ a
    if kind != "dora":
        return total
    norm = total.square().sum(dim=1, keepdim=True).sqrt().detach()  # 2402.09353 §4.3
    magnitude = layer.adapters["default"].magnitude
    return magnitude[:, None] * total / norm


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_layer_computes_the_formula(kind: str, bias: bool) -> None:
    layer = adapted(nn.Linear(7, 5, bias=bias).double(), LoraConfig(**KINDS[kind]))
    trained = {name: one.requires_grad_() for name, one in layer.adapters.named_parameters()}
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    weight = expected(
        kind,
        layer,
        layer.weight,
        trained["default.lora_a.weight"],
        trained["default.lora_b.weight"],
    )
    wanted = x @ weight.T + (layer.bias if bias else 0)
    got = layer(x)
    torch.testing.assert_close(got, wanted)
    above = torch.randn_like(got)
    inputs = [x, *trained.values()]
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs, above), torch.autograd.grad(wanted, inputs, above)
    )
    torch.testing.assert_close(merged_weight(layer), weight.detach())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_computes_the_formula(kind: str, bias: bool) -> None:
    layer = GroupedLinear(4, 6, 5, bias=bias).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer = adapted(layer, LoraConfig(**KINDS[kind]))
    assert type(layer) is LoraGroupedLinear
    x = torch.randn(6, 6, dtype=torch.float64)
    experts = torch.tensor([0, 0, 1, 3, 3, 3])  # none for the third expert
    adapter = layer.adapters["default"]
    rows = []
    for row, expert in zip(x, experts, strict=True):
        part = adapted(nn.Linear(6, 5, bias=bias).double(), LoraConfig(**KINDS[kind]))
        with torch.no_grad():
            part.weight.copy_(layer.weight[expert])
            if bias:
                part.bias.copy_(layer.bias[expert])
            for name, parameter in part.adapters["default"].named_parameters():
                parameter.copy_(adapter.get_parameter(name)[expert])
        rows.append(part(row))
    torch.testing.assert_close(layer(x, group_sorted(experts, 4)), torch.stack(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_computes_the_formula_in_float32(kind: str) -> None:
    """As a router without adapter does, also under autocast."""
    layer = adapted(Float32Linear(7, 5).bfloat16(), LoraConfig(**KINDS[kind]), torch.bfloat16)
    layer.adapters["default"].float()
    a, b = (layer.adapters["default"].get_parameter(f"lora_{one}.weight") for one in "ab")
    x = torch.randn(3, 7, dtype=torch.bfloat16)
    wanted = x.float() @ expected(kind, layer, layer.weight.float(), a, b).T + layer.bias.float()
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_quantised_base_computes_with_its_dequantised_weight(kind: str, format: str) -> None:
    plain = QuantizedLinear.of(nn.Linear(70, 40).requires_grad_(False), format)
    layer = adapted(plain, LoraConfig(**KINDS[kind]), torch.float32)
    same = nn.Linear(70, 40)
    with torch.no_grad():
        same.weight.copy_(plain.dequantized(torch.float32))
        same.bias.copy_(plain.bias)
    other = adapted(same, LoraConfig(**KINDS[kind]), torch.float32)
    other.adapters.load_state_dict(layer.adapters.state_dict())
    x = torch.randn(3, 70)
    torch.testing.assert_close(layer(x), other(x))


def test_experts_may_be_quantised() -> None:
    base = GroupedLinear(3, 32, 16)
    nn.init.normal_(base.weight)
    layer = adapted(QuantizedGroupedLinear.of(base, "int8"), LoraConfig(dora=True), torch.float32)
    groups = group_sorted(torch.tensor([0, 2, 2, 2]), 3)
    x = torch.randn(4, 32)
    base.weight.data = layer.dequantized(torch.float32)
    other = adapted(base, LoraConfig(dora=True), torch.float32)
    other.adapters.load_state_dict(layer.adapters.state_dict())
    torch.testing.assert_close(layer(x, groups), other(x, groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_b_of_zero_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    layer = nn.Linear(37, 50, dtype=dtype)
    x = torch.randn(9, 37, dtype=dtype)
    before = layer(x)
    made = as_subclass(layer, LoraLinear, adapters=nn.ModuleDict(), active="default")
    made.adapters["default"] = LoraConfig(**KINDS[kind]).build(layer.weight.shape)
    for part in (made.adapters["default"].lora_a, made.adapters["default"].lora_b):
        part.to(dtype)
    made.adapters["default"].reset(made, torch.Generator())
    assert torch.equal(made(x), before)


def test_dropout_applies_to_the_update_only() -> None:
    layer = adapted(nn.Linear(64, 8).double(), LoraConfig(dropout=0.5))
    x = torch.randn(1000, 64, dtype=torch.float64)
    base = nn.functional.linear(x, layer.weight, layer.bias)
    update = layer.eval()(x) - base
    torch.manual_seed(0)
    dropped = layer.train()(x) - base
    torch.manual_seed(0)
    a, b = layer.adapters["default"].lora_a.weight, layer.adapters["default"].lora_b.weight
    torch.testing.assert_close(dropped, 2 * nn.functional.dropout(x, 0.5) @ a.T @ b.T)
    assert not torch.allclose(dropped, update)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"rank": 0}, "rank"),
        ({"dropout": 1.0}, "dropout"),
        ({"targets": []}, "targets: the list is empty; name linear layers, or set it to all"),
        ({"targets": [""]}, "targets"),
        ({"kind": "adalora"}, "kind"),
    ],
)
def test_wrong_options(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as error:
        LoraConfig.from_dict(fields)
    assert "\n" not in str(error.value)


LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
}
OF_PEFT = {"self_attn": "attention", "mlp": "feed_forward", "o_proj": "out_proj"}


# Importing PEFT takes seconds, so `grids.yaml` excludes this test from the default suite.
@pytest.mark.parametrize("kind", KINDS)
def test_equals_peft(kind: str, tmp_path: Path) -> None:
    """Logits, loss gradients and the merged model equal PEFT's, in float32 within 1e-5."""
    peft = pytest.importorskip("peft")
    pair = make("llama", LLAMA, tmp_path)
    options = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules="all-linear",
        use_rslora=kind == "rslora",
        use_dora=kind == "dora",
        task_type="CAUSAL_LM",
    )
    with quiet():
        theirs = peft.get_peft_model(pair.theirs, options)
    ours = add_adapter(pair.ours, LoraConfig(**KINDS[kind]))
    own = adapter_parameters(ours)
    generator = torch.Generator().manual_seed(1)
    pairs: dict[str, nn.Parameter] = {}
    for name, parameter in theirs.named_parameters():
        if ".lora_" not in name:
            assert not parameter.requires_grad
            continue
        with torch.no_grad():
            if "magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator))
            else:
                parameter.normal_(std=0.2, generator=generator)
        path = name.removeprefix("base_model.model.model.")
        for before, after in OF_PEFT.items():
            path = path.replace(f"{before}.", f"{after}.")
        layer, _, rest = path.partition(".lora_")
        part = {"A": "lora_a.weight", "B": "lora_b.weight", "m": "magnitude"}[rest[0]]
        ours_here = own.pop(f"{layer}.adapters.default.{part}")
        pairs[name] = ours_here
        ours_here.data.copy_(parameter)
    assert not own
    tokens = torch.randint(VOCAB, (2, 9), generator=generator)
    logits, wanted = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
    weights = torch.randn(logits.shape, generator=generator)
    (logits * weights).mean().backward()
    (wanted * weights).mean().backward()
    for name, parameter in pairs.items():
        torch.testing.assert_close(
            parameter.grad, theirs.get_parameter(name).grad, atol=1e-5, rtol=1e-5
        )
    assert isinstance(pair.theirs, hf.PreTrainedModel)
