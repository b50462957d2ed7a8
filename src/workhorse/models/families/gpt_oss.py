"""gpt-oss-120b & gpt-oss-20b Model Card (OpenAI, 2508.10925)."""

from collections.abc import Sequence

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import (
    Rule,
    Shape,
    Tensors,
    concatenated,
    instead,
    same,
    then_transposed,
    transposed,
)
from workhorse.models.huggingface.rotation import read_rope

STRETCH = nn.YarnScalingConfig(factor=32.0, original_max_seq_len=4096, truncate=False)
"""RoPE scaling of the released models, and the default for a config without RoPE settings."""


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a gpt-oss config: windows in every other layer, learned attention sinks.

    Every layer has a mixture of experts. The experts are clamped SwiGLUs with biases.
    """
    hf.ignore("hidden_act", "initial_context_length", "experts_per_token")
    norm = llama_like.rms_norm(hf, eps=1e-5, multiply="before_cast")
    bias = hf.get("attention_bias", True)
    types = llama_like.layer_types(
        hf, llama_like.alternating(hf, (llama_like.SLIDING, llama_like.FULL))
    )
    window = hf.optional("sliding_window", int, 128)
    rope = read_rope(hf, theta=150_000.0, absent=STRETCH)
    mixture = nn.MoEConfig(
        n_experts=hf.get("num_local_experts", 128),
        top_k=hf.get("num_experts_per_tok", 4),
        d_ff=hf.get("intermediate_size", 2880),
        clamped=nn.ClampedSwigluConfig(
            limit=hf.get("swiglu_limit", 7.0), alpha=hf.get("swiglu_alpha", 1.702)
        ),
        bias=True,
        router=nn.RouterConfig(score="softmax", normalize=True, bias=True),
    )

    def block(kind: str) -> nn.PreNormConfig:
        return nn.PreNormConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 8),
                head_dim=hf.get("head_dim", 64),
                position=rope,
                window=window if kind == llama_like.SLIDING else None,
                sinks=True,
                qkv_bias=bias,
                out_bias=bias,
            ),
            feed_forward=mixture,
        )

    return llama_like.decoder(hf, [block(kind) for kind in types], norm, names=types)


def alternated(ours: tuple[str, str], theirs: str) -> Rule:
    """Conversion rule for a stored tensor that alternates the rows of two of our tensors.

    The first row of each tensor comes first, then the second row of each, and so on.
    """

    def take(tensors: Tensors, shapes: Sequence[Shape], block: nn.BlockConfig) -> Tensors:
        del shapes, block
        return [tensors[0][:, 0::2], tensors[0][:, 1::2]]

    def put(tensors: Tensors, shapes: Sequence[Shape], block: nn.BlockConfig) -> Tensors:
        del shapes, block
        pairs = [tensor.unsqueeze(2) for tensor in tensors]
        return [concatenated(pairs, 2).flatten(1, 2)]

    return Rule(ours, (theirs,), take, put)


MLP, EXPERTS = "layers.{i}.feed_forward.", "layers.{i}.feed_forward.experts."
THEIRS = "model.layers.{i}.mlp.experts."

HUGGING_FACE = (
    Family(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        read=read,
        keys={key: path for key, path in llama_like.KEYS.items() if key != "hidden_act"}
        | {
            "attention_bias": "block.attention.qkv_bias",
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
            "num_local_experts": "block.feed_forward.n_experts",
            "num_experts_per_tok": "block.feed_forward.top_k",
            "swiglu_limit": "block.feed_forward.clamped.limit",
            "swiglu_alpha": "block.feed_forward.clamped.alpha",
        },
        rules=instead(
            same("layers.{i}.attention.kernel.sinks", "model.layers.{i}.self_attn.sinks"),
            same(MLP + "router.proj", "model.layers.{i}.mlp.router"),
            then_transposed(
                alternated(
                    (EXPERTS + "gate_proj.weight", EXPERTS + "up_proj.weight"),
                    THEIRS + "gate_up_proj",
                )
            ),
            alternated(
                (EXPERTS + "gate_proj.bias", EXPERTS + "up_proj.bias"), THEIRS + "gate_up_proj_bias"
            ),
            transposed(EXPERTS + "down_proj.weight", THEIRS + "down_proj"),
            same(EXPERTS + "down_proj.bias", THEIRS + "down_proj_bias"),
            base=llama_like.RULES,
        ),
    ),
)
