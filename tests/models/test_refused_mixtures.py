"""Configs of ERNIE, Hunyuan and the newest mixtures that are refused."""

import pytest

from workhorse.config.base import ConfigError
from workhorse.models.huggingface import Fields, family

SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DENSE, MIXTURE = "hunyuan_v1_dense", "hunyuan_v1_moe"


def stretched(alpha: float) -> dict[str, object]:
    return {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": alpha}}


REFUSED = {
    "a single pair of features": (
        DENSE,
        stretched(50.0) | {"head_dim": 2},
        "gives no finite theta for head_dim=2",
    ),
    "an overflow": (
        DENSE,
        stretched(1e300) | {"head_dim": 4},
        "alpha=1e+300 gives no finite theta",
    ),
    "another attention": (DENSE, {"use_cla": True}, "use_cla=True is not supported"),
    "too few values of moe_topk": (
        MIXTURE,
        {"moe_topk": [1]},
        "moe_topk has length 1 for 2 layers; give one value per layer",
    ),
    "two shared experts": (MIXTURE, {"num_shared_expert": [1, 2]}, "one shared expert"),
    "narrow experts": (
        MIXTURE,
        {"moe_intermediate_size": 12},
        "all experts have width intermediate_size",
    ),
    "a lower bound of the norm": (
        "ernie4_5_moe",
        {"moe_norm_min": 0.5},
        "moe_norm_min=0.5 is not supported",
    ),
    "sigmoid scores": (
        "ernie4_5_moe",
        {"moe_gate_act": "sigmoid"},
        "transformers uses softmax scores",
    ),
    "a layer interval of 0": ("ernie4_5_moe", {"moe_layer_interval": 0}, "is not above zero"),
    "too few layer types": (
        "hy_v3",
        {"mlp_layer_types": ["dense"]},
        "mlp_layer_types has length 1 for 2 layers",
    ),
    "an unknown layer type": (
        "mellum",
        {"mlp_layer_types": ["dense", "spare"]},
        "mlp layer type 'spare' is unknown; did you mean 'sparse'?",
    ),
    "two dense layers, set by another key": (
        "hy_v3",
        {"first_k_dense_replace": 2},
        "first_k_dense_replace=2 is not supported",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_config_is_refused_in_one_line(what: str) -> None:
    model_type, values, message = REFUSED[what]
    with pytest.raises(ConfigError) as error:
        family(model_type).read(Fields(SMALL | values))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
