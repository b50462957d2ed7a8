"""The design of presets, as their papers describe it."""

import pytest

from workhorse.models import preset
from workhorse.models.design import design, in_one_line

# Wiring, norm, positions, attention, reach, scores, feed-forward, biases, head; from the papers.
PAPERS = {
    "transformer-2017": (  # 1706.03762 §3, as a decoder without an encoder
        *("post-norm", "LayerNorm", "sinusoidal", "MHA (multi-head)", "", "", "ReLU"),
        *("the feed-forward", "tied"),
    ),
    "gpt": (  # Radford et al. 2018 §4.1
        *(
            "post-norm",
            "LayerNorm",
            "learned",
            "MHA (multi-head)",
            "",
            "",
            "GELU (tanh)",
            "all",
            "tied",
        ),
    ),
    "gpt3-175b": (  # 2005.14165 §2.1
        *(
            "pre-norm",
            "LayerNorm",
            "learned",
            "MHA (multi-head)",
            "window 256 in 48 of 96 layers",
            "",
        ),
        *("GELU (tanh)", "all", "tied"),
    ),
    "palm-540b": (  # 2204.02311 §2
        *(
            "parallel sub-layers, one norm",
            "LayerNorm without bias",
            "RoPE (theta 10,000)",
            "MQA (multi-query)",
        ),
        *("", "", "SwiGLU", "", "tied"),
    ),
    "bloom-176b": (  # 2211.05100 §3.2
        *("pre-norm", "LayerNorm, also after the embedding", "ALiBi", "MHA (multi-head)", "", ""),
        *("GELU (tanh)", "all", "tied"),
    ),
    "mpt-7b-storywriter": (  # its config.json: alibi_bias_max 16, clip_qkv 6
        *("pre-norm", "LayerNorm without bias", "ALiBi (maximum bias 16)", "MHA (multi-head)"),
        *("", "clip 6", "GELU", "", "tied"),
    ),
    "phi-2": (  # its config.json: 32 of 80 features of a head are rotated
        *("parallel sub-layers, one norm", "LayerNorm", "RoPE on 40% of a head (theta 10,000)"),
        *("MHA (multi-head)", "", "", "GELU (tanh)", "all", "untied, with a bias"),
    ),
    "gpt-neox-20b": (  # 2204.06745 §2.1
        *("parallel sub-layers, two norms", "LayerNorm", "RoPE on 25% of a head (theta 10,000)"),
        *("MHA (multi-head)", "", "", "GELU (tanh)", "all", "untied"),
    ),
    "llama-2-70b": (  # 2307.09288 §2.2
        *("pre-norm", "RMSNorm", "RoPE (theta 10,000)", "GQA (grouped-query, 8 for 64)", "", ""),
        *("SwiGLU", "", "untied"),
    ),
    "olmo-7b": (  # 2402.00838 §2.1
        *(
            "pre-norm",
            "LayerNorm without weight or bias",
            "RoPE (theta 10,000)",
            "MHA (multi-head)",
        ),
        *("", "", "SwiGLU", "", "untied"),
    ),
    "olmo-2-7b": (  # 2501.00656 §2
        *(
            "reordered norm (after each sub-layer)",
            "RMSNorm",
            "RoPE (theta 500,000)",
            "MHA (multi-head)",
            "",
        ),
        *("query-key norm", "SwiGLU", "", "untied"),
    ),
    "mixtral-8x7b": (  # 2401.04088 Table 1
        *("pre-norm", "RMSNorm", "RoPE (theta 1,000,000)", "GQA (grouped-query, 8 for 32)", "", ""),
        *("2 of 8 SwiGLU experts", "", "untied"),
    ),
    "gemma-2-9b": (  # 2408.00118 §2
        *("sandwich norm", "RMSNorm (1 + weight)", "RoPE (theta 10,000)"),
        *("GQA (grouped-query, 8 for 16)", "window 4,096 in 21 of 42 layers", "soft-cap 50"),
        *("GeGLU", "", "tied, soft-cap 30"),
    ),
    "smollm3-3b": (  # every fourth layer without positions (2501.18795)
        *("pre-norm", "RMSNorm", "RoPE (theta 5,000,000) in 27 of 36 layers"),
        *("GQA (grouped-query, 4 for 16)", "", "", "SwiGLU", "", "tied"),
    ),
    "deepseek-v3": (  # 2412.19437 §2.1 and §4.2
        *("pre-norm", "RMSNorm", "RoPE (theta 10,000, yarn scaling)", "MLA (latent)", "", ""),
        *(
            "SwiGLU in 3 of 61 layers, 8 of 256 SwiGLU experts and 1 shared in 58 of 61 layers",
            "",
            "untied",
        ),
    ),
    "gpt-oss-20b": (  # 2508.10925 §2
        *(
            "pre-norm",
            "RMSNorm",
            "RoPE (theta 150,000, yarn scaling)",
            "GQA (grouped-query, 8 for 64)",
        ),
        *("window 128 in 12 of 24 layers", "sinks", "4 of 32 clamped SwiGLU experts"),
        *("all", "untied"),
    ),
}


@pytest.mark.parametrize("name", PAPERS)
def test_design_is_the_papers(name: str) -> None:
    assert tuple(design(preset(name)).values()) == PAPERS[name]


def test_in_one_line() -> None:
    assert in_one_line(preset("gpt3-175b")) == (
        "pre-norm; LayerNorm; positions: learned; MHA (multi-head); window 256 in 48 of 96 layers; "
        "GELU (tanh); biases: all; head: tied"
    )
    assert "positions: RoPE (theta 10,000)" in in_one_line(preset("llama-7b"))
    assert "; biases: none; " in in_one_line(preset("llama-7b"))
