"""The llama.cpp architectures that Workhorse can write and read, the most used first.

Each architecture describes the computation in a file of llama.cpp's folder `src/models`.
"""

import math

from workhorse.checkpoints.gguf.architecture import (
    ATTENTION_BIASES,
    BIASED,
    BIASED_GELU,
    BIASLESS,
    FRACTION,
    FULL_NORM,
    GATE_UP,
    GEGLU,
    GELU,
    GRANITE,
    GRANITE_KEYS,
    HEAD_NORM,
    LAYER,
    LLAMA,
    LOCAL,
    NO_POSITION,
    QKV,
    REORDERED,
    RMS,
    ROTARY,
    SCALING,
    SWIGLU,
    THETA,
    TIE,
    TIED,
    WINDOW,
    Architecture,
    Data,
    divided_logits,
    fewer_than_64_layers,
    local_layers_unscaled,
    no_position_every_fourth,
    some_window,
    turns,
    windows_at_64_layers,
)
from workhorse.checkpoints.gguf.mixtures import MIXTURE, MIXTURES
from workhorse.nn import AttentionConfig
from workhorse.nn.attention.self_attention import QKNormConfig
from workhorse.nn.blocks import (
    ParallelConfig,
    PreNormConfig,
    ReorderedNormConfig,
    SandwichNormConfig,
)
from workhorse.nn.embedding import EmbeddingConfig, HeadConfig
from workhorse.nn.feedforward import MlpConfig
from workhorse.nn.norms import LayerNormConfig
from workhorse.nn.positions.absolute import AlibiConfig, LearnedPositionConfig

ALIBI = AttentionConfig(n_heads=1, position=AlibiConfig(max_bias=8.0))
SANDWICH = SandwichNormConfig(norm=RMS, attention=ROTARY, feed_forward=GEGLU)
REORDERED_LLAMA = ReorderedNormConfig(norm=RMS, attention=ROTARY, feed_forward=SWIGLU)
GPT2 = PreNormConfig(
    norm=LAYER,
    attention=AttentionConfig(n_heads=1, qkv_bias=True, out_bias=True),
    feed_forward=BIASED_GELU,
)
FALCON = ParallelConfig(norm=LAYER, norms=1, attention=ROTARY, feed_forward=GELU)
COHERE = ParallelConfig(norm=BIASLESS, norms=1, attention=ROTARY, feed_forward=SWIGLU)
STABLE_NORM = QKNormConfig(norm=BIASLESS, over="each_head")
SCALED_HEAD = HeadConfig(multiplier=0.5)
CAPPED = ROTARY.replace(softcap=1.0)


def _gemma_scale(data: Data, deepest: int) -> float:
    """Return the attention scale of Gemma 2 and 3.

    It is `1/sqrt(head_dim)`, except in the 27B models, which use `1/sqrt(d_model / n_heads)`.
    llama.cpp recognises the 27B model by its number of layers, `deepest`.
    """
    attention = data["layers"][0]["attention"]
    wide = data["d_model"] // attention["n_heads"]
    return 1 / math.sqrt(wide if data["n_layers"] == deepest else attention["head_dim"])


DENSE: tuple[Architecture, ...] = (
    Architecture(
        "llama",
        ("llama", "mistral", "mixtral"),
        (LLAMA, LLAMA.replace(feed_forward=MIXTURE)),
        pairing="interleaved",
        scalings=("linear", "yarn", "llama3"),
        optional=(TIE, *ATTENTION_BIASES, "feed_forward.bias"),
    ),
    Architecture(
        "qwen2",
        ("qwen2",),
        (LLAMA,),
        optional=(TIE, "head.bias", "attention.qkv_bias"),
        square=True,
    ),
    Architecture(
        "qwen3",
        ("qwen3",),
        (LLAMA.replace(attention=ROTARY.replace(qk_norm=HEAD_NORM)),),
        optional=(TIE, "attention.qkv_bias"),
    ),
    Architecture(
        "gemma",
        ("gemma",),
        (LLAMA.replace(feed_forward=GEGLU),),
        head=TIED,
        optional=(),
        embedding_by_width=True,
    ),
    Architecture(
        "gemma2",
        ("gemma2",),
        (
            SANDWICH.replace(attention=CAPPED),
            SANDWICH.replace(attention=CAPPED.replace(window=1)),
        ),
        head=HeadConfig(tied=True, cap=1.0),
        carried=(WINDOW, "attention.softcap", "head.cap"),
        varying=(WINDOW, THETA),
        optional=(),
        embedding_by_width=True,
        scale=lambda data: _gemma_scale(data, 46),
        window_every=2,
        keys={
            "attn_logit_softcapping": "block.attention.softcap",
            "final_logit_softcapping": "head.cap",
        },
        check=some_window,
    ),
    Architecture(
        "gemma3",
        ("gemma3_text",),
        (
            SANDWICH.replace(attention=ROTARY.replace(qk_norm=HEAD_NORM)),
            SANDWICH.replace(attention=LOCAL.replace(qk_norm=HEAD_NORM)),
        ),
        carried=(WINDOW,),
        varying=(WINDOW, THETA, SCALING),
        optional=(TIE, "head.cap"),
        scalings=("linear",),
        embedding_by_width=True,
        scale=lambda data: _gemma_scale(data, 62),
        window_every=6,
        keys={"final_logit_softcapping": "head.cap"},
        check=local_layers_unscaled,
    ),
    Architecture(
        "gpt2",
        ("gpt2",),
        (GPT2,),
        embedding=EmbeddingConfig(position=LearnedPositionConfig()),
        fused={"attn_qkv": QKV},
        square=True,
    ),
    Architecture(
        "phi2",
        ("phi",),
        (FALCON.replace(attention=BIASED, feed_forward=BIASED_GELU),),
        head=HeadConfig(bias=True),
        carried=(FRACTION,),
        copied_head=True,
        square=True,
    ),
    Architecture(
        "phi3",
        ("phi3",),
        (LLAMA,),
        carried=(FRACTION,),
        scalings=("longrope",),
        fused={"attn_qkv": QKV, "ffn_up": GATE_UP},
        square=True,
    ),
    Architecture(
        "olmo",
        ("olmo",),
        (LLAMA.replace(norm=LayerNormConfig(weight=False, bias=False)),),
        pairing="interleaved",
        optional=(TIE, "attention.clip"),
        keys={"attention.clamp_kqv": "block.attention.clip"},
        square=True,
    ),
    Architecture(
        "olmo2",
        ("olmo2", "olmo3"),
        (
            REORDERED_LLAMA.replace(attention=ROTARY.replace(qk_norm=FULL_NORM)),
            REORDERED_LLAMA.replace(attention=LOCAL.replace(qk_norm=FULL_NORM)),
        ),
        carried=(WINDOW,),
        varying=(WINDOW, THETA, SCALING),
        names=REORDERED,
        copied_head=True,
        square=True,
        check=local_layers_unscaled,
        window_every=4,
    ),
    Architecture(
        "stablelm",
        ("stablelm",),
        tuple(
            kind.replace(attention=attention)
            for kind in (
                PreNormConfig(norm=LAYER, attention=ROTARY, feed_forward=SWIGLU),
                ParallelConfig(norm=LAYER, norms=1, attention=ROTARY, feed_forward=SWIGLU),
            )
            for attention in (ROTARY, ROTARY.replace(qk_norm=STABLE_NORM))
        ),
        carried=(FRACTION,),
        optional=(TIE, "attention.qkv_bias"),
        copied_head=True,
        square=True,
    ),
    Architecture(
        "starcoder2",
        ("starcoder2",),
        (PreNormConfig(norm=LAYER, attention=BIASED, feed_forward=BIASED_GELU),),
        square=True,
    ),
    Architecture(
        "gptneox",
        ("gpt_neox",),
        (
            ParallelConfig(norm=LAYER, norms=2, attention=BIASED, feed_forward=BIASED_GELU),
            PreNormConfig(norm=LAYER, attention=BIASED, feed_forward=BIASED_GELU),
        ),
        carried=(FRACTION,),
        keys={"use_parallel_residual": lambda data: data["block"]["kind"] == "parallel"},
        may_be=lambda block, _, keys: (
            (block.kind == "parallel") == keys.get("use_parallel_residual", True)
        ),
        fused={"attn_qkv": QKV},
        copied_head=True,
        square=True,
    ),
    Architecture(
        "bloom",
        ("bloom",),
        (GPT2.replace(attention=ALIBI.replace(qkv_bias=True, out_bias=True)),),
        embedding=EmbeddingConfig(norm=LAYER),
        fused={"attn_qkv": QKV},
        square=True,
    ),
    Architecture(
        "falcon",
        ("falcon",),
        (FALCON, FALCON.replace(norms=2)),
        names={"attention_norm": "attn_norm_2", "feed_forward_norm": "attn_norm"},
        fused={"attn_qkv": QKV},
        square=True,
    ),
    Architecture(
        "mpt",
        ("mpt",),
        (PreNormConfig(norm=BIASLESS, attention=ALIBI, feed_forward=GELU),),
        carried=("attention.position.max_bias",),
        optional=(TIE, "attention.clip"),
        keys={
            "attention.max_alibi_bias": "block.attention.position.max_bias",
            "attention.clamp_kqv": "block.attention.clip",
        },
        fused={"attn_qkv": QKV},
        square=True,
    ),
    Architecture(
        "command-r",
        ("cohere",),
        (COHERE,),
        head=HeadConfig(tied=True, multiplier=0.5),
        carried=("head.multiplier",),
        optional=("attention.qkv_bias",),
        pairing="interleaved",
        keys={"logit_scale": "head.multiplier"},
        square=True,
        check=fewer_than_64_layers,
    ),
    Architecture(
        "cohere2",
        ("cohere2",),
        (COHERE.replace(attention=NO_POSITION), COHERE.replace(attention=LOCAL)),
        head=HeadConfig(tied=True, multiplier=0.5),
        carried=(WINDOW, "head.multiplier"),
        optional=("attention.qkv_bias",),
        varying=(WINDOW,),
        pairing="interleaved",
        keys={"logit_scale": "head.multiplier"},
        square=True,
        check=some_window,
        window_every=4,
    ),
    Architecture(
        "smollm3",
        ("smollm3",),
        (LLAMA, LLAMA.replace(attention=NO_POSITION)),
        optional=(TIE, "attention.qkv_bias"),
        pairing="interleaved",
        check=no_position_every_fourth,
        may_be=lambda block, number, _: turns(block) == bool((number + 1) % 4),
    ),
    Architecture(
        "granite",
        ("granite",),
        (LLAMA.replace(residual_multiplier=0.5),),
        embedding=EmbeddingConfig(multiplier=2.0),
        head=SCALED_HEAD,
        carried=GRANITE,
        optional=(TIE, *ATTENTION_BIASES, "feed_forward.bias"),
        scalings=("linear", "yarn", "llama3"),
        pairing="interleaved",
        keys=GRANITE_KEYS,
        solved=divided_logits,
    ),
    Architecture(
        "nemotron",
        ("nemotron",),
        (
            PreNormConfig(
                norm=LAYER, attention=ROTARY, feed_forward=MlpConfig(d_ff=1, activation="relu2")
            ),
        ),
        carried=(FRACTION,),
        optional=(TIE, *ATTENTION_BIASES, "feed_forward.bias"),
        copied_head=True,
        square=True,
    ),
    Architecture(
        "exaone4",
        ("exaone4",),
        tuple(
            REORDERED_LLAMA.replace(attention=attention.replace(qk_norm=HEAD_NORM))
            for attention in (ROTARY, LOCAL, NO_POSITION)
        ),
        carried=(WINDOW,),
        varying=(WINDOW,),
        scalings=("llama3",),
        names=REORDERED,
        square=True,
        check=windows_at_64_layers,
        may_be=lambda block, _, keys: (
            turns(block) == (keys["block_count"] != 64 or block.attention.window is not None)  # noqa: PLR2004
        ),
        window_every=4,
    ),
    Architecture(
        "glm4",
        ("glm4",),
        (SANDWICH.replace(feed_forward=SWIGLU),),
        carried=(FRACTION,),
        optional=(TIE, "attention.qkv_bias"),
        fused={"ffn_up": GATE_UP},
        pairing="interleaved",
    ),
    Architecture(
        "ernie4_5",
        ("ernie4_5",),
        (LLAMA,),
        optional=(TIE, *ATTENTION_BIASES),
        pairing="interleaved",
    ),
    Architecture(
        "arcee",
        ("arcee",),
        (LLAMA.replace(feed_forward=MlpConfig(d_ff=1, activation="relu2")),),
        optional=(TIE, "attention.qkv_bias"),
        scalings=("linear", "yarn", "llama3"),
        pairing="interleaved",
    ),
    Architecture(
        "hunyuan-dense",
        ("hunyuan_v1_dense",),
        (LLAMA.replace(attention=ROTARY.replace(qk_norm=QKNormConfig(norm=RMS, after_rope=True))),),
        optional=(TIE, "attention.qkv_bias"),
    ),
    Architecture(
        "seed_oss",
        ("seed_oss",),
        (LLAMA,),
        optional=(TIE, "attention.qkv_bias"),
        names={"feed_forward_norm": "post_attention_norm"},
    ),
)

ARCHITECTURES = (*DENSE, *MIXTURES)
