"""Keys that have two names in a config, and which of the two counts.

The classes of transformers have names of their own for some sizes and accept the usual name too
(`attribute_map`). In a config that gives both, the usual name counts: it is set last. Older files
have further names, which no class keeps.
"""

from collections.abc import Mapping
from typing import Any

_GPT = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_MPT = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
}
_ROUTED = {"num_local_experts": "n_routed_experts"}
_LOCAL = {"num_experts": "num_local_experts"}
_PLAIN = {"num_local_experts": "num_experts"}

ALIASES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("codegen", "ctrl", "gpt2", "gpt_bigcode", "gptj", "openai-gpt"), _GPT),
    **dict.fromkeys(("axk1", "deepseek_v3", "dots1", "glm4_moe", "solar_open"), _ROUTED),
    **dict.fromkeys(
        ("gpt_oss", "kolibri1", "mellum", "minimax_m2", "mixtral", "qwen3_moe"), _LOCAL
    ),
    **dict.fromkeys(("flex_olmo", "hy_v3", "olmoe"), _PLAIN),
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "dbrx": {**_MPT, "max_position_embeddings": "max_seq_len"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "glm4_moe_lite": {**_ROUTED, "head_dim": "qk_rope_head_dim"},
    "gpt_neo": {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    "hunyuan_v1_moe": {**_PLAIN, "num_experts_per_tok": "moe_topk"},
    "internlm3": {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    "mpt": _MPT,
    "xglm": {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "attention_heads",
    },
}
"""By model type, the name of the class for each usual name."""
OLDER: Mapping[str, Mapping[str, str]] = {
    "bloom": {"n_embed": "hidden_size"},
    "falcon": {"n_embed": "hidden_size"},
}
"""By model type, the name of the class for names that only older files have; these count."""
OF_ALL = {"torch_dtype": "dtype"}
"""The same for every type; the newer name counts."""
OWN_COUNTS = ("kolibri1", "mellum", "qwen3_moe")
"""Types whose own name counts instead."""


def with_own_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A config with the names of its class alone, and a line for each key that says two things.

    Args:
        values: as parsed from JSON, with a `model_type`.
    """
    found, remarks = dict(values), list[str]()
    model_type = values["model_type"]
    names = {**ALIASES.get(model_type, {}), **OLDER.get(model_type, {}), **OF_ALL}
    for usual, own in names.items():
        value = found.pop(usual, None)
        if value is None:
            continue
        given = found.get(own)
        own_counts = given is not None and (model_type in OWN_COUNTS or usual in OF_ALL)
        if not own_counts:
            found[own] = value
        if given is not None and given != value:
            counts = f"{own}={given}" if own_counts else f"{usual}={value}"
            passed = f"{usual}={value}" if own_counts else f"{own}={given}"
            remarks.append(f"{counts} counts, and {passed} does not, as in transformers")
    return found, remarks
