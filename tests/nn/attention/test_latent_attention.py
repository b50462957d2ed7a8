"""Latent attention compared with its formula in float64, and the contents of its cache."""

import math

import pytest
import torch
from torch import Tensor

from tests.nn.grid import error, random_tokens
from workhorse.nn import Context, Decoder, DecoderConfig
from workhorse.nn.attention.latent import LatentAttention, LatentAttentionConfig

D_MODEL, HEADS, RANK, NOPE, ROPE, VALUE = 12, 3, 10, 6, 4, 5


def config(**fields: object) -> LatentAttentionConfig:
    widths = {"kv_rank": RANK, "nope_dim": NOPE, "rope_dim": ROPE, "value_dim": VALUE}
    return LatentAttentionConfig.from_dict({"n_heads": HEADS, **widths, **fields})


def decoder(**fields: object) -> Decoder:
    attention = {"kind": "latent_attention", **config(**fields).to_dict()}
    block = {
        "kind": "pre_norm",
        "norm": {"kind": "rms_norm"},
        "attention": attention,
        "feed_forward": {"kind": "mlp", "d_ff": 8},
    }
    made = DecoderConfig.from_dict(
        {
            "vocab_size": 23,
            "d_model": D_MODEL,
            "n_layers": 2,
            "max_seq_len": 32,
            "blocks": {"main": block},
            "init": {"kind": "fan_in", "embedding_std": 1.0},
        }
    )
    return made.build().eval()


def turned(x: Tensor, theta: float = 10_000.0) -> Tensor:
    """Rotate the pairs (i, i + half) of (seq, rope_dim) features by the position."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half).double()
    a, b = x[:, :half], x[:, half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@pytest.mark.parametrize("q_rank", [None, 7])
@pytest.mark.parametrize("scale", [None, 0.4])
def test_it_is_its_formula(q_rank: int | None, scale: float | None) -> None:
    """2405.04434 §2.1, head by head: one rotary key for all, values and keys from one latent."""
    module = config(q_rank=q_rank, scale=scale).build(D_MODEL)
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * 0.5
    x = torch.randn(1, 7, D_MODEL)
    w = {name: parameter.double() for name, parameter in module.named_parameters()}

    def normed(latent: Tensor, weight: Tensor) -> Tensor:
        return latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    rows = x[0].double()
    if q_rank is None:
        queries = rows @ w["q_proj.weight"].T
    else:
        latent_q = normed(rows @ w["q_down_proj.weight"].T, w["q_norm.weight"])
        queries = latent_q @ w["q_up_proj.weight"].T
    latent = normed(rows @ w["kv_down_proj.weight"].T, w["kv_norm.weight"])
    k_rope = turned(rows @ w["k_rope_proj.weight"].T)
    outputs = []
    for head in range(HEADS):
        q = queries[:, head * (NOPE + ROPE) :][:, : NOPE + ROPE]
        k = latent @ w["k_up_proj.weight"][head * NOPE :][:NOPE].T
        v = latent @ w["v_up_proj.weight"][head * VALUE :][:VALUE].T
        scores = q[:, :NOPE] @ k.T + turned(q[:, NOPE:]) @ k_rope.T
        scores = scores * (scale or 1 / math.sqrt(NOPE + ROPE))
        hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
        outputs.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v)
    expected = torch.cat(outputs, dim=-1) @ w["out_proj.weight"].T
    y = module(x, Context(1, 7, torch.device("cpu")))
    torch.testing.assert_close(y[0].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reach", [{}, {"window": 3}, {"chunk": 4}])
@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 1, 4, 2]])
def test_attending_to_latents_is_attending_to_what_they_unfold_to(
    reach: dict[str, int], pieces: list[int]
) -> None:
    model = decoder(q_rank=7, qkv_bias=True, **reach)
    tokens = random_tokens(model.config, 2, 12)
    cache = model.new_cache(2, 12)
    with torch.no_grad():
        steps = [model(piece, cache=cache) for piece in tokens.split(pieces, dim=1)]
        assert error(torch.cat(steps, dim=1), model(tokens)) <= 1e-5


def test_the_cache_keeps_one_latent_and_one_rotary_key_a_token() -> None:
    """kv_rank + rope_dim elements per token; projected keys and values take heads · widths."""
    model = decoder()
    cache = model.new_cache(2, 31)
    with torch.no_grad():
        model(random_tokens(model.config, 2, 4), cache=cache)
    for store in cache.cache.stores:
        assert store.k is not None
        assert store.v is not None
        numbers = sum(part.shape[0] * part.shape[-1] for part in (store.k, store.v))
        assert numbers == RANK + ROPE
        assert numbers < HEADS * (NOPE + ROPE + VALUE) / 3


def test_gradients_reach_every_matrix() -> None:
    model = decoder(q_rank=7)
    model(random_tokens(model.config, 1, 6)).square().sum().backward()
    assert isinstance(model.layers[0].attention, LatentAttention)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
