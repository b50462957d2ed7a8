"""Parameter counts by component, compared with the whole decoder and with hand arithmetic."""

import pytest

from workhorse.models import preset
from workhorse.models.describe import count_parameters
from workhorse.nn import DecoderConfig

MIXED = DecoderConfig.from_dict(
    {
        "vocab_size": 11,
        "d_model": 8,
        "n_layers": 5,
        "max_seq_len": 7,
        "embedding": {"position": {"kind": "learned"}, "norm": {"kind": "layer_norm"}},
        "blocks": {
            "narrow": {
                "kind": "pre_norm",
                "norm": {"kind": "rms_norm"},
                "attention": {
                    "n_heads": 2,
                    "n_kv_heads": 1,
                    "qk_norm": {"norm": {"kind": "rms_norm"}},
                },
                "feed_forward": {"kind": "mlp", "d_ff": 16, "bias": True},
            },
            "wide": {
                "kind": "sandwich_norm",
                "norm": {"kind": "rms_norm"},
                "attention": {"n_heads": 4, "qkv_bias": True},
                "feed_forward": {"kind": "gated_mlp", "d_ff": 24},
            },
        },
        "pattern": ["narrow", "narrow", "wide"],
        "final_norm": {"kind": "rms_norm"},
        "head": {"bias": True},
    }
)


def test_components_equal_arithmetic() -> None:
    d, narrow, wide = 8, 4, 1  # layers of each kind: narrow narrow wide narrow narrow
    assert count_parameters(MIXED) == {
        "embedding": 11 * d + 7 * d,
        "attention": narrow * (2 * d * d + 2 * d * 4) + wide * (4 * d * d + 3 * d),
        "feed_forward": narrow * (2 * d * 16 + 16 + d) + wide * (3 * d * 24),
        # embedding norm with bias; narrow: two, and two of head width; wide: four; final norm
        "norms": 2 * d + narrow * (2 * d + 2 * 4) + wide * (4 * d) + d,
        "head": 11 * d + 11,
        "total": 3139,
    }


@pytest.mark.parametrize(
    "config",
    [MIXED, MIXED.replace(head={"tied": True}), preset("gpt3-125m"), preset("gpt2-medium")],
    ids=["mixed", "mixed-tied", "gpt3-125m", "gpt2-medium"],
)
def test_total_equals_the_whole_decoder(config: DecoderConfig) -> None:
    whole = sum(parameter.numel() for parameter in config.build(device="meta").parameters())
    assert count_parameters(config)["total"] == whole


def test_a_tied_matrix_is_counted_once() -> None:
    tied = count_parameters(MIXED.replace(head={"tied": True}))
    assert tied["head"] == 0
    assert tied["embedding"] == count_parameters(MIXED)["embedding"]
