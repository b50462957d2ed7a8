"""The Llama 3 Herd of Models (2407.21783): Llama 3, 3.1, 3.2 and 3.3."""

from typing import Any

from workhorse.models.families.released.release import Release


def stretched(factor: float) -> dict[str, Any]:
    """Return the RoPE scaling of Llama 3.1 as in `config.json`."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


llama3 = Release(
    "llama",
    "2407.21783 Table 3; the released config.json",
    vocab_size=128_256,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    tie_word_embeddings=False,
)

SIZES: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
    },
    "70B": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "intermediate_size": 28672,
    },
    "405B": {
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "intermediate_size": 53248,
    },
}
LONG: dict[str, Any] = {"max_position_embeddings": 131_072, "rope_scaling": stretched(8.0)}
ROUNDED = "Printed as 70B, a name more than a count; the released model has 70.55B."
SMALL: dict[str, Any] = {
    "max_position_embeddings": 131_072,
    "rope_scaling": stretched(32.0),
    "tie_word_embeddings": True,
}

PRESETS = (
    llama3("llama-3-8b", 8_030_261_248, printed="8B", **SIZES["8B"]),
    llama3("llama-3-70b", 70_553_706_496, printed="70B", notes=(ROUNDED,), **SIZES["70B"]),
    llama3("llama-3.1-8b", 8_030_261_248, printed="8B", **SIZES["8B"], **LONG),
    llama3(
        "llama-3.1-70b", 70_553_706_496, printed="70B", notes=(ROUNDED,), **SIZES["70B"], **LONG
    ),
    llama3(
        "llama-3.1-405b",
        405_853_388_800,
        printed="405B",
        notes=("Printed as 405B, a name more than a count; the released model has 405.85B.",),
        **SIZES["405B"],
        **LONG,
    ),
    llama3(
        "llama-3.2-1b",
        1_235_814_400,
        printed="1B",
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        head_dim=64,
        intermediate_size=8192,
        **SMALL,
    ),
    llama3(
        "llama-3.2-3b",
        3_212_749_824,
        printed="3B",
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=24,
        head_dim=128,
        intermediate_size=8192,
        **SMALL,
    ),
    llama3(
        "llama-3.3-70b", 70_553_706_496, printed="70B", notes=(ROUNDED,), **SIZES["70B"], **LONG
    ),
)
