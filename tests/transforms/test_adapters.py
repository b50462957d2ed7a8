"""Adapters of whole decoders: which layers they change, switching, merging, wrong input."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.nn.grid import CAUSAL, COVERING
from workhorse.errors import WorkhorseError
from workhorse.execute.body import body_of
from workhorse.nn import Decoder, DecoderConfig
from workhorse.transforms.adapters import (
    adapted_layers,
    adapter_parameters,
    add_adapter,
    disabled,
    merge_adapter,
    set_adapter,
)
from workhorse.transforms.lora import LoraConfig
from workhorse.transforms.quantization import quantize
from workhorse.transforms.record import check_weights_kept, transforms_of

TOLERANCE = 1e-5
"""Relative to the largest logit. The models are float64, but norms and routers use float32."""
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
CACHED = sorted(CAUSAL, key=lambda config: all(block.grouped for block in config.blocks.values()))
"""Latent attention first, which multiplies by weights without calling their layers."""
CONFIG = DecoderConfig.from_dict(
    {
        "vocab_size": 11,
        "d_model": 32,
        "n_layers": 2,
        "max_seq_len": 8,
        "blocks": {
            "main": {
                "kind": "pre_norm",
                "norm": "rms_norm",
                "attention": {"kind": "attention", "n_heads": 4, "position": "rope"},
                "feed_forward": {"kind": "gated_mlp", "d_ff": 48},
            }
        },
        "final_norm": "rms_norm",
    }
)


def built(config: DecoderConfig = CONFIG) -> Decoder:
    """A decoder in evaluation mode, whose biases and norms are random too."""
    decoder = config.build(kernel="eager").eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return decoder


@torch.no_grad()
def shaken(decoder: Decoder, name: str = "default") -> Decoder:
    """Give an adapter random values."""
    for path, parameter in adapter_parameters(decoder, name).items():
        if path.endswith("magnitude"):
            parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
        else:
            parameter.normal_(std=0.2)
    return decoder


@torch.no_grad()
def logits(decoder: Decoder) -> Tensor:
    return decoder(TOKENS)


def difference(before: Tensor, after: Tensor) -> float:
    """The largest difference of logits, relative to the largest logit."""
    return ((before - after).abs().max() / after.abs().max()).item()


def moves(before: Tensor, after: Tensor) -> bool:
    return difference(before, after) > 1e-2


@pytest.mark.parametrize("dora", [False, True])
def test_it_starts_as_its_base_and_learns(dora: bool) -> None:
    decoder = built()
    before = logits(decoder)
    add_adapter(decoder, LoraConfig(dora=dora))
    assert torch.equal(logits(decoder), before)
    decoder(TOKENS).square().sum().backward()
    own = adapter_parameters(decoder)
    for name, parameter in decoder.named_parameters():
        assert parameter.requires_grad == (name in own)
        assert (parameter.grad is not None) == (name in own)
    assert len(own) == 14 * (3 if dora else 2)
    assert set(own) | {name for name, _ in built().named_parameters()} == {
        name for name, _ in decoder.named_parameters()
    }
    assert moves(before, logits(shaken(decoder)))


@pytest.mark.parametrize("config", COVERING, ids=range(len(COVERING)))
def test_every_architecture_carries_an_adapter(config: DecoderConfig) -> None:
    """All layers but routers are changed; merged weights, and B of zero, compute the same."""
    decoder = built(config).double()
    before = logits(decoder)
    options = LoraConfig(rank=3, dora=config.n_layers % 2 == 0)
    add_adapter(decoder, options)
    assert torch.equal(logits(decoder), before)
    shaken(decoder)
    changed = adapted_layers(decoder)
    left = {
        name
        for name, part in decoder.layers.named_modules()
        if isinstance(part, nn.Linear)
        and ".adapters." not in name
        and f"layers.{name}" not in changed
    }
    assert all(name.endswith("router.proj") for name in left)
    after = logits(decoder)
    assert moves(before, after)
    with disabled(decoder):
        assert torch.equal(logits(decoder), before)
    merged = merge_adapter(decoder)
    assert not adapted_layers(merged)
    assert difference(logits(merged), after) < TOLERANCE


@pytest.mark.parametrize("config", CACHED, ids=range(len(CACHED)))
def test_decoding_with_a_cache_uses_the_adapter(config: DecoderConfig) -> None:
    decoder = shaken(add_adapter(built(config).double(), LoraConfig(rank=3)))
    merged = merge_adapter(decoder)
    with torch.no_grad():
        got, wanted = (
            torch.cat([one(part, cache=cache) for part in TOKENS.split((3, 5), dim=1)], dim=1)
            for one, cache in ((model, model.new_cache(1, 8)) for model in (decoder, merged))
        )
    assert difference(got, wanted) < TOLERANCE


def test_merging_rounds_once_and_shares_the_rest() -> None:
    decoder = shaken(add_adapter(built().bfloat16(), LoraConfig(targets=("q_proj",))))
    layer = decoder.get_submodule("layers.0.attention.q_proj")
    a, b = (
        adapter_parameters(decoder)[f"layers.0.attention.q_proj.adapters.default.{part}.weight"]
        for part in ("lora_a", "lora_b")
    )
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        merged = merge_adapter(decoder)
    assert not saved  # for gradients
    exact = layer.weight.float() + 2 * b.float() @ a.float()
    assert torch.equal(merged.get_parameter("layers.0.attention.q_proj.weight"), exact.bfloat16())
    name = "layers.0.attention.k_proj.weight"
    assert merged.get_parameter(name).data_ptr() == decoder.get_parameter(name).data_ptr()
    assert not transforms_of(merged)
    assert all(parameter.requires_grad for parameter in merged.parameters())


def test_several_adapters_on_one_base() -> None:
    decoder = built()
    base = logits(decoder)
    first = logits(
        shaken(add_adapter(decoder, LoraConfig(targets=("q_proj",)), name="first"), "first")
    )
    add_adapter(decoder, LoraConfig(rank=2, targets=("q_proj", "up_proj")), name="second")
    assert torch.equal(logits(decoder), base)
    trained = {name for name, one in decoder.named_parameters() if one.requires_grad}
    assert trained == set(adapter_parameters(decoder, "second"))
    second = logits(shaken(decoder, "second"))
    assert moves(first, second)
    set_adapter(decoder, "first")
    assert torch.equal(logits(decoder), first)
    torch.testing.assert_close(logits(merge_adapter(decoder)), first)
    set_adapter(decoder, "second")
    assert torch.equal(logits(decoder), second)
    with disabled(decoder):
        assert torch.equal(logits(decoder), base)
    assert torch.equal(logits(decoder), second)


def test_a_body_has_the_adapter() -> None:
    decoder = shaken(add_adapter(built(), LoraConfig()))
    body = body_of(decoder)
    assert torch.equal(logits(body), logits(decoder))
    assert adapter_parameters(body).keys() == adapter_parameters(decoder).keys()
    assert torch.equal(logits(copy.deepcopy(decoder)), logits(decoder))


def test_initial_values_depend_on_seed_and_name_only() -> None:
    every = adapter_parameters(add_adapter(built(), LoraConfig()))
    some = adapter_parameters(add_adapter(built(), LoraConfig(targets=("up_proj", "k_proj"))))
    for name, parameter in some.items():
        assert torch.equal(parameter, every[name])
    other = adapter_parameters(add_adapter(built(), LoraConfig(), seed=1))
    drawn = [parameter for name, parameter in every.items() if "lora_a" in name]
    assert len({parameter.flatten()[0].item() for parameter in drawn}) == len(drawn)
    assert not any(torch.equal(other[name], every[name]) for name in every if "lora_a" in name)
    largest = max(parameter.abs().max().item() * parameter.shape[1] ** 0.5 for parameter in drawn)
    assert 0.9 < largest <= 1


def test_ranks_and_alphas_of_layers() -> None:
    config = LoraConfig(
        rank=4, alpha=8, ranks={"1.attention.q_proj": 2, "q_proj": 3}, alphas={"down_proj": 6}
    )
    layers = adapted_layers(add_adapter(built(), config))
    found = {path: one.adapters["default"] for path, one in layers.items()}
    assert len(found["layers.0.attention.q_proj"].lora_a.weight) == 3
    assert len(found["layers.1.attention.q_proj"].lora_a.weight) == 2
    assert found["layers.1.attention.q_proj"].scale == 8 / 2
    assert found["layers.0.attention.k_proj"].scale == 8 / 4
    assert found["layers.0.feed_forward.down_proj"].scale == 6 / 4


def test_also_trained_modules() -> None:
    config = LoraConfig(targets=("q_proj",), also_train=("final_norm", "embedding"))
    decoder = add_adapter(built(), config)
    trained = {name for name, one in decoder.named_parameters() if one.requires_grad}
    assert trained == set(adapter_parameters(decoder))
    assert {"final_norm.weight", "embedding.tokens.weight"} < trained
    assert len(trained) == 2 * 2 + 2
    with pytest.raises(WorkhorseError, match="cannot be switched off"), disabled(decoder):
        pass
    with pytest.raises(WorkhorseError, match="cannot share it"):
        add_adapter(decoder, LoraConfig(), name="other")


def test_a_tied_head_is_trained_as_the_embedding() -> None:
    config = LoraConfig(targets=("q_proj",), also_train=("head",))
    decoder = add_adapter(built(CONFIG.replace(head={"tied": True})), config)
    trained = {name for name, one in decoder.named_parameters() if one.requires_grad}
    assert "embedding.tokens.weight" in trained
    assert trained == set(adapter_parameters(decoder))


def mixture() -> Decoder:
    """A mixture of experts, whose choice depends on a bias."""
    experts = {"kind": "moe", "d_ff": 16, "n_experts": 4, "top_k": 2}
    experts["router"] = {"score": "sigmoid", "selection_bias": True}
    fields = CONFIG.to_dict()
    fields["blocks"]["main"]["feed_forward"] = experts
    return built(DecoderConfig.from_dict(fields))


@pytest.mark.parametrize("dora", [False, True])
def test_a_named_router_is_trained_and_merged(dora: bool) -> None:
    decoder = mixture()
    before = logits(decoder)
    add_adapter(decoder, LoraConfig(targets=("router.proj",), dora=dora))
    assert torch.equal(logits(decoder), before)
    decoder(TOKENS).square().sum().backward()
    assert all(one.grad is not None for one in adapter_parameters(decoder).values())
    shaken(decoder)
    assert moves(before, logits(decoder))
    assert difference(logits(merge_adapter(decoder)), logits(decoder)) < TOLERANCE


def test_a_router_s_selection_bias_is_never_trained() -> None:
    config = LoraConfig(targets=("q_proj",), also_train=("router",))
    decoder = add_adapter(mixture(), config)
    trained = {name for name, one in decoder.named_parameters() if one.requires_grad}
    assert trained == set(adapter_parameters(decoder))
    assert not any("selection_bias" in name for name in trained)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_quantised_base(format: Any) -> None:
    decoder = built()
    quantize(decoder, format)
    before = logits(decoder)
    add_adapter(decoder, LoraConfig(dora=True))
    assert torch.equal(logits(decoder), before)
    decoder(TOKENS).square().sum().backward()
    own = adapter_parameters(decoder)
    assert own
    assert all(parameter.grad is not None for parameter in own.values())
    with pytest.raises(WorkhorseError, match="load the base without quantize"):
        merge_adapter(decoder)


def test_a_named_head_may_be_tied_and_is_merged_into_a_separate_one() -> None:
    tied = CONFIG.replace(head={"tied": True})
    assert "head.proj" not in adapted_layers(add_adapter(built(tied), LoraConfig()))
    decoder = built(tied)
    before = logits(decoder)
    shaken(add_adapter(decoder, LoraConfig(targets=("head.proj",))))
    assert moves(before, logits(decoder))
    merged = merge_adapter(decoder)
    assert not merged.config.head.tied
    torch.testing.assert_close(logits(merged), logits(decoder))
    assert merged.embedding.tokens.weight is not merged.head.proj.weight
    untied = shaken(add_adapter(built(), LoraConfig(targets=("head.proj",))))
    torch.testing.assert_close(logits(merge_adapter(untied)), logits(untied))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"targets": ["q_prj"]}, "targets: no module is called q_prj; did you mean 'q_proj'?"),
        ({"targets": "all-linear"}, "^targets: 'all-linear' is not allowed; give 'all' or a list"),
        ({"targets": ["attention"]}, "targets: layers.0.attention is not a linear layer"),
        ({"targets": ["embedding.tokens"]}, "use also_train to train its weights"),
        ({"targets": ["q_proj"], "ranks": {"k_proj": 2}}, "ranks: no layer in targets is called"),
        ({"also_train": ["heads"]}, "also_train: no module is called heads"),
        ({"also_train": ["attention_sum"]}, "has no weights to train; remove it"),
        (
            {"also_train": ["attention"]},
            "layers.0.attention.q_proj is in targets and in also_train",
        ),
    ],
)
def test_wrong_names(fields: dict[str, Any], line: str) -> None:
    decoder = built()
    with pytest.raises(WorkhorseError, match=line.replace("?", r"\?")) as error:
        add_adapter(decoder, LoraConfig.from_dict(fields))
    assert "\n" not in str(error.value)
    assert not adapted_layers(decoder)
    assert all(parameter.requires_grad for parameter in decoder.parameters())


def test_wrong_use() -> None:
    decoder = add_adapter(built(), LoraConfig())
    for name in ("a.b", "", "keys", "1"):
        with pytest.raises(WorkhorseError, match="cannot be the name of an adapter"):
            add_adapter(decoder, LoraConfig(), name=name)
    with pytest.raises(WorkhorseError, match="already has an adapter default"):
        add_adapter(decoder, LoraConfig())
    with pytest.raises(WorkhorseError, match="no adapter 'other'; known: default"):
        set_adapter(decoder, "other")
    with pytest.raises(WorkhorseError, match="no adapter 'default'; known: none"):
        adapter_parameters(built())
    with pytest.raises(
        WorkhorseError, match="quantize cannot be applied after adapt; apply quantize first"
    ):
        quantize(decoder, "int8")
    with pytest.raises(WorkhorseError, match="adapt cannot change a decoder that is prepared"):
        add_adapter(body_of(built()), LoraConfig())
    with pytest.raises(WorkhorseError, match="merge it first, with workhorse convert"):
        check_weights_kept(decoder)
    quantised = quantize(built(), "int8")
    assert isinstance(quantised, Decoder)
    with pytest.raises(WorkhorseError, match="attention is quantised and cannot be trained"):
        add_adapter(quantised, LoraConfig(targets=("up_proj",), also_train=("attention",)))
