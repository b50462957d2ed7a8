"""Initial weights: the standard deviation of every kind of matrix under every scheme."""

import math
import subprocess
import sys

import pytest
import torch

from tests.nn.grid import COVERING, name
from workhorse.config.base import ConfigError
from workhorse.nn import Decoder, DecoderConfig

D_MODEL, D_FF, N_LAYERS, VOCAB = 128, 256, 3, 500
SQUARE = (D_MODEL, D_MODEL)


def build(init: dict[str, object], **changes: object) -> Decoder:
    torch.manual_seed(0)
    return DecoderConfig.from_dict(
        {
            "vocab_size": VOCAB,
            "d_model": D_MODEL,
            "n_layers": N_LAYERS,
            "max_seq_len": 100,
            "embedding": {"position": {"kind": "learned"}},
            "blocks": {
                "main": {
                    "kind": "pre_norm",
                    "norm": {"kind": "layer_norm"},
                    "attention": {
                        "n_heads": 4,
                        "qkv_bias": True,
                        "out_bias": True,
                        "output_gate": True,
                        "sinks": True,
                    },
                    "feed_forward": {"kind": "gated_mlp", "d_ff": D_FF, "bias": True},
                }
            },
            "head": {"bias": True},
            "init": init,
            **changes,
        }
    ).build("eager")


def spread(weight: torch.Tensor) -> float:
    return weight.std().item()


SCHEMES = {
    "normal": lambda fan_out, fan_in: 0.05,
    "fan_in": lambda fan_out, fan_in: 1 / math.sqrt(fan_in),
    "xavier": lambda fan_out, fan_in: math.sqrt(2 / (fan_in + fan_out)),
    "he": lambda fan_out, fan_in: math.sqrt(2 / fan_in),
}


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("residual", ["plain", "scaled", "zero"])
def test_every_kind_of_matrix_has_its_spread(kind: str, residual: str) -> None:
    options = {"std": 0.05} if kind == "normal" else {}
    decoder = build({"kind": kind, "residual": residual, "embedding_std": 0.3, **options})
    expected = SCHEMES[kind]
    scale = {"plain": 1.0, "scaled": 1 / math.sqrt(2 * N_LAYERS), "zero": 0.0}[residual]
    for layer in decoder.layers:
        attention, feed_forward = layer.attention, layer.feed_forward
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.gate.proj):
            assert spread(linear.weight) == pytest.approx(expected(*SQUARE), rel=0.05)
        for linear in (feed_forward.gate_proj, feed_forward.up_proj):
            assert spread(linear.weight) == pytest.approx(expected(D_FF, D_MODEL), rel=0.05)
        for linear in (attention.out_proj, feed_forward.down_proj):
            plain = expected(*linear.weight.shape)
            assert spread(linear.weight) == pytest.approx(plain * scale, rel=0.05)
    assert spread(decoder.head.proj.weight) == pytest.approx(expected(VOCAB, D_MODEL), rel=0.05)
    assert spread(decoder.embedding.tokens.weight) == pytest.approx(0.3, rel=0.05)
    assert spread(decoder.embedding.positions.table.weight) == pytest.approx(0.3, rel=0.05)
    for key, parameter in decoder.named_parameters():
        if key.endswith("bias"):
            assert torch.count_nonzero(parameter) == 0, key
        assert abs(parameter.mean().item() - ("norm.weight" in key)) < 0.02, key


@pytest.mark.parametrize("kind", SCHEMES)
def test_every_expert_is_drawn_as_a_matrix_of_its_own(kind: str) -> None:
    """It uses the fan-in and fan-out of one expert, and scales the residual projection."""
    options = {"std": 0.05} if kind == "normal" else {}
    mixture = {"kind": "moe", "n_experts": 4, "top_k": 2, "d_ff": D_FF, "bias": True}
    block = build({"kind": kind}).config.to_dict()["blocks"]["main"] | {"feed_forward": mixture}
    decoder = build({"kind": kind, **options}, blocks={"main": block})
    experts = decoder.layers[1].feed_forward.experts
    expected = SCHEMES[kind]
    for up, down in zip(experts.up_proj.weight, experts.down_proj.weight, strict=True):
        assert spread(up) == pytest.approx(expected(D_FF, D_MODEL), rel=0.05)
        plain = expected(D_MODEL, D_FF)
        assert spread(down) == pytest.approx(plain / math.sqrt(2 * N_LAYERS), rel=0.05)
    assert torch.count_nonzero(experts.gate_proj.bias) == 0


def test_the_way_down_to_a_latent_is_not_a_way_to_the_stream() -> None:
    """Its name has the same ending as the feed-forward's `down_proj`, which is scaled."""
    attention = {"kind": "latent_attention", "n_heads": 4, "q_rank": 64, "kv_rank": 64}
    attention |= {"nope_dim": 16, "rope_dim": 16, "value_dim": 32}
    block = build({"kind": "normal"}).config.to_dict()["blocks"]["main"] | {"attention": attention}
    decoder = build({"kind": "normal", "std": 0.05}, blocks={"main": block})
    drawn = decoder.layers[0].attention
    for linear in (drawn.q_down_proj, drawn.kv_down_proj, drawn.k_up_proj, drawn.k_rope_proj):
        assert spread(linear.weight) == pytest.approx(0.05, rel=0.06)
    scaled = 0.05 / math.sqrt(2 * N_LAYERS)
    assert spread(drawn.out_proj.weight) == pytest.approx(scaled, rel=0.05)


@pytest.mark.parametrize(("kind", "normal"), [("normal", True), ("xavier", False), ("he", True)])
def test_the_shape_of_the_distribution(kind: str, normal: bool) -> None:
    """Xavier is uniform: no values beyond sqrt(3) deviations; a normal has 8 % there."""
    weight = build({"kind": kind}).layers[0].attention.q_proj.weight
    outside = (weight.abs() > 1.75 * weight.std()).float().mean().item()
    assert (outside > 0.05) is normal


def test_a_tied_head_is_drawn_as_the_embedding() -> None:
    decoder = build({"kind": "normal", "embedding_std": 0.3}, head={"tied": True})
    assert decoder.head.proj.weight is decoder.embedding.tokens.weight
    assert spread(decoder.head.proj.weight) == pytest.approx(0.3, rel=0.05)
    with pytest.raises(ConfigError, match=r"init.head: zero would also zero the tied .*tied=false"):
        build({"kind": "normal", "head": "zero"}, head={"tied": True})


def test_a_zero_head_gives_equal_odds_to_every_token() -> None:
    decoder = build({"kind": "normal", "head": "zero"})
    logits = decoder(torch.tensor([[1, 2, 3]]))
    assert torch.count_nonzero(logits) == 0


def test_zero_residuals_start_as_the_identity() -> None:
    decoder = build({"kind": "normal", "residual": "zero"})
    tokens = torch.tensor([[1, 2, 3]])
    embedded = decoder.embedding(tokens, torch.arange(3)[None])
    assert torch.equal(decoder.hidden(tokens), embedded)


@pytest.mark.parametrize("config", COVERING, ids=map(name, range(len(COVERING))))
def test_no_weight_is_left_as_memory_happened_to_be(config: DecoderConfig) -> None:
    """Weights start uninitialised; the same seed must draw every weight equally, twice."""
    drawn = []
    for filling in (0.123, -7.0):
        decoder = config.build(device="meta").to_empty(device="cpu")
        decoder.tie_weights()
        for parameter in decoder.parameters():
            parameter.data.fill_(filling)
        decoder.initialize(torch.Generator().manual_seed(5))
        drawn.append(decoder.state_dict())
    assert all(torch.equal(drawn[0][key], drawn[1][key]) for key in drawn[0])


def test_a_generator_or_the_global_seed_decides() -> None:
    config = COVERING[0]
    torch.manual_seed(3)
    first = config.build()
    torch.manual_seed(3)
    second = config.build()
    key = "layers.0.attention.q_proj.weight"
    assert torch.equal(first.state_dict()[key], second.state_dict()[key])
    first.initialize(torch.Generator().manual_seed(1))
    assert not torch.equal(first.state_dict()[key], second.state_dict()[key])
    second.initialize(torch.Generator().manual_seed(1))
    assert torch.equal(first.state_dict()[key], second.state_dict()[key])


IMPORTS = """
import sys
import workhorse.train
from workhorse.models import preset
preset("gpt2").build(device="meta")
print("sympy" in sys.modules)
"""


def test_a_decoder_on_meta_needs_no_compiler() -> None:
    """Importing the compiler would cost every loaded model or run 75 MB and a second."""
    command = [sys.executable, "-c", IMPORTS]
    assert subprocess.check_output(command, text=True).strip() == "False"


@pytest.mark.parametrize("config", COVERING)
def test_weights_drawn_one_by_one_are_those_of_a_whole_decoder(config: DecoderConfig) -> None:
    torch.manual_seed(0)
    decoder = config.build()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    drawn = dict(config.draw(torch.device("cpu")))
    assert torch.equal(torch.get_rng_state(), after)
    whole = dict(decoder.named_parameters())
    assert drawn.keys() == whole.keys()
    assert all(torch.equal(drawn[name], weight) for name, weight in whole.items())
