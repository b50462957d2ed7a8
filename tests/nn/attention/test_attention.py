"""Options of attention, each compared with its definition."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from workhorse.config.base import ConfigError
from workhorse.nn import Attention, AttentionConfig, Context
from workhorse.nn.attention.self_attention import QKNormConfig
from workhorse.nn.cache.paged import PagedCache
from workhorse.nn.norms import RMSNormConfig
from workhorse.nn.positions.absolute import NoPositionConfig
from workhorse.nn.positions.rope import RopeConfig

D_MODEL, SEQ = 16, 7
X = torch.randn(2, SEQ, D_MODEL, generator=torch.Generator().manual_seed(0))


def context(seq: int = SEQ) -> Context:
    return Context(2, seq, torch.device("cpu"))


def build(**options: object) -> Attention:
    attention = AttentionConfig(**{"n_heads": 4, **options}).build(D_MODEL, 0, "eager").eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in attention.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    return attention


def inputs_of(attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values that reach the kernel."""
    caught: list[tuple[Tensor, Tensor, Tensor]] = []
    handle = attention.kernel.register_forward_pre_hook(lambda _m, args: caught.append(args[:3]))
    attention(X, context())
    handle.remove()
    return caught[0]


def test_heads_of_keys_are_shared_by_neighbouring_queries() -> None:
    """Query heads 0 and 1 read the first head of keys and values, 2 and 3 the second."""
    grouped, plain = build(n_kv_heads=2), build()
    plain.load_state_dict(
        {
            name: torch.cat([part.repeat(2, 1) for part in tensor.split(4)])
            if name.startswith(("k_proj", "v_proj"))
            else tensor
            for name, tensor in grouped.state_dict().items()
        }
    )
    assert torch.allclose(grouped(X, context()), plain(X, context()), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 1 / math.sqrt(4)),
        ({"head_dim": 9}, 1 / math.sqrt(9)),
        ({"scale": 0.3}, 0.3),
        ({"n_heads": 2}, 1 / math.sqrt(8)),
    ],
)
def test_scores_are_divided_by_the_root_of_the_heads_width(
    options: dict[str, object], scale: float
) -> None:
    attention = build(**options)
    weights: list[Tensor] = []
    attention.kernel.weights.register_forward_hook(lambda _m, _i, w: weights.append(w))
    q, k, _ = inputs_of(attention)
    scores = (q @ k.mT * scale).masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), -math.inf)
    assert torch.allclose(weights[0], scores.softmax(-1), atol=1e-6)


def test_attention_stands_alone_with_the_same_scale() -> None:
    """Built by hand in a notebook, for any sequence length, on the default device."""
    attention = Attention(D_MODEL, 4)
    assert attention.head_dim == 4
    assert attention.kernel.scoring.scale == 0.5
    for seq in (3, 11):
        assert attention(torch.randn(2, seq, D_MODEL), context(seq)).shape == (2, seq, D_MODEL)


def test_clip_holds_queries_keys_and_values() -> None:
    for part in inputs_of(build(clip=0.25)):
        assert part.abs().max().item() == 0.25
    assert max(part.abs().max() for part in inputs_of(build())) > 1


@pytest.mark.parametrize("over", ["head", "each_head", "full"])
def test_qk_norm_is_over_one_head_or_all(over: str) -> None:
    plain = build(n_kv_heads=2)
    normed = build(n_kv_heads=2, qk_norm={"norm": {"kind": "rms_norm"}, "over": over})
    normed.load_state_dict(plain.state_dict(), strict=False)
    q_before, k_before, v_before = inputs_of(plain)
    q, k, v = inputs_of(normed)
    assert torch.equal(v, v_before)
    for name, x, expected in (("q_norm", q, q_before), ("k_norm", k, k_before)):
        heads = x.shape[1]
        weights = torch.cat([p.data for n, p in normed.named_parameters() if n.startswith(name)])
        assert weights.numel() == {"head": 4, "each_head": 4 * heads, "full": 4 * heads}[over]
        weight = weights if over == "head" else weights.view(heads, 1, 4)
        axes = (1, 3) if over == "full" else (3,)
        size = expected.square().mean(axes, keepdim=True)
        assert torch.allclose(x, expected / (size + 1e-6).sqrt() * weight, atol=1e-5), name


def test_the_norm_before_or_after_the_rotation() -> None:
    qk_norm = {"norm": {"kind": "layer_norm"}}
    before = build(position={"kind": "rope"}, qk_norm=qk_norm)
    after = build(position={"kind": "rope"}, qk_norm={**qk_norm, "after_rope": True})
    after.load_state_dict(before.state_dict())
    plain = build(position={"kind": "rope"})
    plain.load_state_dict(before.state_dict(), strict=False)
    turned, _, _ = inputs_of(plain)
    assert torch.allclose(inputs_of(after)[0], after.q_norm(turned), atol=1e-6)
    unturned = build()
    unturned.load_state_dict(before.state_dict(), strict=False)
    normed = before.q_rotation(before.q_norm(inputs_of(unturned)[0]), context())
    assert torch.allclose(inputs_of(before)[0], normed, atol=1e-6)
    assert (inputs_of(before)[0] - inputs_of(after)[0]).abs().max() > 0.1


def test_queries_grow_with_position() -> None:
    """Llama 4: `1 + scale · ln(1 + floor((p + offset) / length))`."""
    growing = build(query_scaling={"scale": 0.5, "length": 3, "offset": 1})
    plain = build()
    growing.load_state_dict(plain.state_dict())
    factor = [1 + 0.5 * math.log(1 + (position + 1) // 3) for position in range(SEQ)]
    q, k, v = inputs_of(plain)
    expected = (q * torch.tensor(factor)[:, None], k, v)
    for ours, reference in zip(inputs_of(growing), expected, strict=True):
        assert torch.allclose(ours, reference, atol=1e-6)


def test_the_output_gate_is_a_sigmoid_of_the_input() -> None:
    gated = build(output_gate=True)
    plain = build()
    plain.load_state_dict(gated.state_dict(), strict=False)
    plain.out_proj = gated.out_proj = torch.nn.Identity()
    gate = torch.sigmoid(X @ gated.gate.proj.weight.T)
    assert torch.allclose(gated(X, context()), gate * plain(X, context()), atol=1e-5)


def test_the_inner_norm_is_of_all_heads_and_comes_after_the_gate() -> None:
    normed = build(output_gate=True, inner_norm={"kind": "rms_norm", "eps": 1e-3})
    plain = build(output_gate=True)
    normed.load_state_dict(plain.state_dict(), strict=False)
    normed.inner_norm.weight.data.uniform_(0.5, 2.0)
    plain.out_proj = normed.out_proj = torch.nn.Identity()
    y = plain(X, context())
    expected = y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * normed.inner_norm.weight
    assert torch.allclose(normed(X, context()), expected, atol=1e-5)


def test_sinks_take_weight_and_give_nothing() -> None:
    with_sinks, plain = build(sinks=True), build()
    plain.load_state_dict(with_sinks.state_dict(), strict=False)
    with_sinks.kernel.sinks.data.fill_(-100.0)
    assert torch.allclose(with_sinks(X, context()), plain(X, context()), atol=1e-6)
    with_sinks.kernel.sinks.data.fill_(100.0)
    assert with_sinks(X, context()).abs().max() < 1e-6


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("out_bias", [False, True])
def test_biases_are_where_they_are_asked_for(qkv_bias: bool, out_bias: bool) -> None:
    attention = build(qkv_bias=qkv_bias, out_bias=out_bias)
    biased = {name for name, _ in attention.named_parameters() if name.endswith("bias")}
    expected = {f"{part}_proj.bias" for part in "qkv"} if qkv_bias else set()
    assert biased == expected | ({"out_proj.bias"} if out_bias else set())


def test_widths_of_every_projection() -> None:
    attention = build(n_heads=6, n_kv_heads=2, head_dim=5, value_dim=3)
    shapes = {name: tuple(p.shape) for name, p in attention.named_parameters()}
    assert shapes == {
        "q_proj.weight": (30, 16),
        "k_proj.weight": (10, 16),
        "v_proj.weight": (6, 16),
        "out_proj.weight": (16, 18),
    }
    assert attention(X, context()).shape == X.shape


BAD = [
    (
        {"n_heads": 12, "n_kv_heads": 5},
        "n_heads=12 is not divisible by n_kv_heads=5; choose a divisor of n_heads",
    ),
    (
        {"causal": False, "window": 3},
        "causal=false does not support window or chunk; remove them",
    ),
    ({"causal": False, "chunk": 3}, "causal=false does not support window or chunk; remove them"),
    ({"window": 3, "chunk": 4}, "window=3 and chunk=4 exclude each other; remove one"),
    (
        {"qk_norm": {"norm": {"kind": "rms_norm"}, "after_rope": True}},
        "qk_norm.after_rope=true needs a rope position; remove it",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_attention_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AttentionConfig(**{"n_heads": 4, **options})
    assert str(caught.value).startswith(message)


def test_heads_that_do_not_divide_the_width() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^d_model=16 is not divisible by n_heads=3; choose a divisor, or give head_dim$",
    ):
        AttentionConfig(n_heads=3).build(16)


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_heads": 5},
        {"n_heads": 0},
        {"n_heads": -4},
        {"n_heads": 4, "n_kv_heads": 3},
        {"n_heads": 4, "n_kv_heads": 0},
        {"n_heads": 4, "head_dim": -1},
        {"n_heads": 4, "value_dim": 0},
        {"n_heads": 4, "head_dim": 3, "rope": RopeConfig()},
        {"n_heads": 4, "d_model": 0},
        {"n_heads": 4, "d_model": -64},
    ],
)
def test_a_module_refuses_the_heads_that_its_config_refuses(sizes: dict[str, Any]) -> None:
    options = {"d_model": 64, **sizes}
    with pytest.raises(ConfigError) as by_module:
        Attention(**options)
    position = options.pop("rope", NoPositionConfig())
    d_model = options.pop("d_model")
    with pytest.raises(ConfigError) as by_config:
        AttentionConfig(position=position, **options).build(d_model)
    assert str(by_module.value) == str(by_config.value)


def test_no_cache_without_causality() -> None:
    cache = PagedCache(4, 1, torch.device("cpu"), 4)
    with pytest.raises(
        ConfigError, match=r"^causal=false cannot decode with a cache; run the whole"
    ):
        build(causal=False).cache_entry(cache)


def test_a_module_alone_norms_after_the_rotation_too() -> None:
    norms = QKNormConfig(norm=RMSNormConfig(), after_rope=True)
    rope = RopeConfig()
    alone = Attention(16, 4, rope=rope, qk_norm=norms)
    built = AttentionConfig(n_heads=4, position=rope, qk_norm=norms).build(16)
    built.load_state_dict(alone.state_dict())
    x = torch.randn(2, 5, 16)
    assert torch.equal(alone(x), built(x))
    assert "rotate_then_norm" in repr(alone)
    with pytest.raises(ConfigError, match=r"^qk_norm\.after_rope=true needs a rope position"):
        Attention(16, 4, qk_norm=norms)
