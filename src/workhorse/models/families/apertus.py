"""Apertus: Democratizing Open and Compliant LLMs for Global Language Environments (2509.14233)."""

from collections.abc import Sequence

from torch import Tensor

from workhorse import nn
from workhorse.errors import WorkhorseError
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import Rule, Shape, Tensors, instead, same
from workhorse.models.huggingface.rotation import read_rope, rope_section

STRETCH = nn.Llama3ScalingConfig(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
)
"""RoPE scaling of the released models, and the default for a config without RoPE settings."""


def read(hf: Fields) -> nn.DecoderConfig:
    """Read an Apertus config: LLaMA with an ungated xIELU feed-forward and norms on q and k."""
    norm = llama_like.rms_norm(hf, eps=1e-5)
    bias = hf.get("attention_bias", False)
    hf.refuse("qk_norm", True, "Apertus in transformers always has norms on queries and keys")
    hf.refuse("post_norm", False, "Apertus in transformers has no norms after the sub-layers")
    hf.refuse("mlp_bias", False, "Apertus in transformers has no feed-forward biases")
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            position=read_rope(
                hf, theta=12e6, theta_key="rope_theta" if rope_section(hf) else None, absent=STRETCH
            ),
            qk_norm=nn.QKNormConfig(norm=norm),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=nn.MlpConfig(
            d_ff=hf.need("intermediate_size", int),
            activation=llama_like.activation(hf, default="xielu"),
        ),
    )
    return llama_like.decoder(hf, block, norm)


def xielu(ours: str, theirs: str) -> Rule:
    """Conversion rule for xIELU: two learned parameters, saved together with two constants."""

    def take(tensors: Tensors, shapes: Sequence[Shape], block: nn.BlockConfig) -> Tensors:
        del shapes, block
        alpha_p, alpha_n, beta, eps = tensors
        for name, found, expected in zip(
            ("beta", "eps"), (beta, eps), constants(alpha_p), strict=True
        ):
            if found.to(expected).ne(expected):
                raise WorkhorseError(
                    f"xIELU with {name}={found.item():g} is not supported; "
                    f"only {expected.item():g} is"
                )
        return [alpha_p, alpha_n]

    def put(tensors: Tensors, shapes: Sequence[Shape], block: nn.BlockConfig) -> Tensors:
        del shapes, block
        return [*tensors, *constants(tensors[0])]

    def constants(like: Tensor) -> list[Tensor]:
        return [like.new_full((), value) for value in (nn.XIELU.BETA, nn.XIELU.EPS)]

    return Rule(
        (ours + "alpha_p", ours + "alpha_n"),
        tuple(theirs + name for name in ("alpha_p", "alpha_n", "beta", "eps")),
        take,
        put,
    )


HUGGING_FACE = (
    Family(
        model_type="apertus",
        architecture="ApertusForCausalLM",
        read=read,
        keys=llama_like.KEYS | {"attention_bias": "block.attention.qkv_bias"},
        rules=instead(
            xielu("layers.{i}.feed_forward.activation.", "model.layers.{i}.mlp.act_fn."),
            same("layers.{i}.attention_norm", "model.layers.{i}.attention_layernorm"),
            same("layers.{i}.feed_forward_norm", "model.layers.{i}.feedforward_layernorm"),
            base=llama_like.RULES,
        ),
    ),
)
