"""Falcon: The Falcon Series of Open Language Models (Almazrouei et al., 2311.16867)."""

from typing import Literal

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.models.huggingface import gpt_like, llama_like
from workhorse.models.huggingface.family import Data, Family, equals
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import same
from workhorse.models.huggingface.rotation import ROPE_KEYS, read_rope


def falcon(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    norms: Literal[1, 2],
    vocab_size: int = 65024,
    max_seq_len: int = 2048,
) -> nn.DecoderConfig:
    """Build a Falcon config: parallel blocks, RoPE, few key-value heads, exact GELU, no biases.

    The 7B shares one norm between attention and feed-forward; the larger ones have one for each.
    """
    norm = nn.LayerNormConfig(eps=1e-5)
    block = nn.ParallelConfig(
        norm=norm,
        norms=norms,
        attention=nn.AttentionConfig(
            n_heads=n_heads, n_kv_heads=n_kv_heads, position=nn.RopeConfig(theta=10_000.0)
        ),
        feed_forward=nn.MlpConfig(d_ff=4 * d_model, activation="gelu"),
    )
    return nn.DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        blocks={"main": block},
        final_norm=norm,
        head=nn.HeadConfig(tied=True),
        init=nn.NormalInitConfig(std=0.02, residual="plain"),
    )


NAMES = {"intermediate_size": "ffn_hidden_size", "hidden_act": "activation"}


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a config of Falcon-7B, of the larger Falcon models, or of Falcon-RW with ALiBi."""
    hf = hf.renamed(NAMES)
    hf.ignore("ffn_factor", "rotary", "rope_parameters", "rope_scaling", "rope_theta")
    hf.refuse(
        "apply_residual_connection_post_layernorm", False, "transformers ignores it in Falcon"
    )
    norm = nn.LayerNormConfig(eps=hf.get("layer_norm_epsilon", 1e-5))
    bias = hf.get("bias", False)
    parts: Data = {
        "norm": norm,
        "attention": gpt_like.attention(
            hf,
            n_kv_heads=_kv_heads(hf),
            position=nn.AlibiConfig(scaled=True, bfloat16=True)
            if hf.get("alibi", False)
            else read_rope(hf),
            qkv_bias=bias,
            out_bias=bias,
        ),
        "feed_forward": gpt_like.mlp(hf, "gelu", d_ff=gpt_like.d_ff_or_fourfold(hf), bias=bias),
        "dropout": hf.get("hidden_dropout", 0.0),
    }
    norms = _norms(hf)
    block = nn.ParallelConfig(norms=norms, **parts) if norms else nn.PreNormConfig(**parts)
    length = hf.get("max_position_embeddings", 2048)
    return llama_like.decoder(hf, block, norm, tied=True, max_seq_len=length)


def _kv_heads(hf: Fields) -> int | None:
    """Read the number of key-value heads; None means one per query head."""
    few = hf.optional("num_kv_heads", int)
    one = hf.get("multi_query", True)
    if hf.get("new_decoder_architecture", False):
        return few
    return 1 if one else None


def _norms(hf: Fields) -> Literal[1, 2] | None:
    """Read the number of norms in a parallel block; None if the sub-layers are sequential."""
    given = hf.optional("num_ln_in_parallel_attn", int)
    parallel = hf.get("parallel_attn", True)
    new = hf.get("new_decoder_architecture", False)
    if (new and not parallel) or given not in ((None, 1, 2) if new else (None, 1)):
        raise ConfigError(
            f"{hf.where}: new_decoder_architecture={new}, parallel_attn={parallel} and "
            f"num_ln_in_parallel_attn={given} are not a Falcon layout; correct the file"
        )
    if new:
        return 1 if given == 1 else 2
    return 1 if parallel else None


def is_new(data: Data) -> bool:
    """Return `new_decoder_architecture` for `config.json`.

    True for parallel blocks with two norms or grouped heads, as in the larger Falcon models.
    """
    block = data["block"]
    grouped = 1 < block["attention"]["n_kv_heads"] < block["attention"]["n_heads"]
    return block["kind"] == "parallel" and (grouped or block["norms"] == 2)  # noqa: PLR2004


def new_norms(data: Data) -> int | None:
    """Return `num_ln_in_parallel_attn`, a key that only the larger Falcon models have."""
    return data["block"]["norms"] if is_new(data) else None


ATTENTION_NORM, FEED_FORWARD_NORM = "layers.{i}.attention_norm", "layers.{i}.feed_forward_norm"

HUGGING_FACE = (
    Family(
        model_type="falcon",
        architecture="FalconForCausalLM",
        read=read,
        keys=gpt_like.written(NAMES)
        | ROPE_KEYS
        | {
            "num_kv_heads": "block.attention.n_kv_heads",
            "new_decoder_architecture": is_new,
            "num_ln_in_parallel_attn": new_norms,
            "multi_query": equals("block.attention.n_kv_heads", 1),
            "parallel_attn": equals("block.kind", "parallel"),
            "alibi": equals("block.attention.position.kind", "alibi"),
            "bias": "block.feed_forward.bias",
            "layer_norm_epsilon": "final_norm.eps",
        },
        rules=(
            same("embedding.tokens", "transformer.word_embeddings"),
            gpt_like.fused_qkv("transformer.h.{i}.self_attention.query_key_value"),
            same("layers.{i}.attention.out_proj", "transformer.h.{i}.self_attention.dense"),
            same("layers.{i}.feed_forward.up_proj", "transformer.h.{i}.mlp.dense_h_to_4h"),
            same("layers.{i}.feed_forward.down_proj", "transformer.h.{i}.mlp.dense_4h_to_h"),
            same("layers.{i}.norm", "transformer.h.{i}.input_layernorm"),
            same(ATTENTION_NORM, "transformer.h.{i}.ln_attn", wiring="parallel"),
            same(FEED_FORWARD_NORM, "transformer.h.{i}.ln_mlp", wiring="parallel"),
            same(ATTENTION_NORM, "transformer.h.{i}.input_layernorm"),
            same(FEED_FORWARD_NORM, "transformer.h.{i}.post_attention_layernorm"),
            same("final_norm", "transformer.ln_f"),
            same("head.proj", "lm_head"),
        ),
        ignored=(r".*\.rotary_emb\.inv_freq", r".*\.maybe_rotary\.inv_freq"),
    ),
)
