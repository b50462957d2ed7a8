"""GPT-NeoX-20B (2204.06745), Pythia (2304.01373) and GPT-NeoX-Japanese (ABEJA, 2022)."""

from workhorse import nn
from workhorse.models.huggingface import gpt_like, llama_like
from workhorse.models.huggingface.family import Data, Family, equals
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import same
from workhorse.models.huggingface.rotation import ROPE_KEYS, read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a GPT-NeoX config: parallel blocks with two norms, RoPE on a quarter of each head."""
    hf.ignore("classifier_dropout")
    norm = nn.LayerNormConfig(eps=hf.get("layer_norm_eps", 1e-5))
    bias = hf.get("attention_bias", True)
    dropout = hf.get("hidden_dropout", 0.0)
    parts: Data = {
        "norm": norm,
        "attention": gpt_like.attention(
            hf,
            position=_rope(hf, fraction=0.25),
            qkv_bias=bias,
            out_bias=bias,
        ),
        "feed_forward": gpt_like.mlp(hf, "gelu"),
        "dropout": dropout,
    }
    parallel = hf.get("use_parallel_residual", True)
    block = nn.ParallelConfig(norms=2, **parts) if parallel else nn.PreNormConfig(**parts)
    return llama_like.decoder(hf, block, norm, embedding=nn.EmbeddingConfig(dropout=dropout))


def _rope(hf: Fields, fraction: float) -> nn.RopeConfig:
    """Read the RoPE settings from GPT-NeoX's own top-level keys or from `rope_parameters`."""
    return read_rope(hf, theta_key="rotary_emb_base", fraction=fraction, fraction_key="rotary_pct")


def read_japanese(hf: Fields) -> nn.DecoderConfig:
    """Read a GPT-NeoX-Japanese config: sequential sub-layers and only one bias.

    The bias is on the attention output of the last layer.
    """
    hf.ignore("is_decoder")
    norm, depth = (
        nn.LayerNormConfig(eps=hf.get("layer_norm_eps", 1e-5)),
        hf.need("num_hidden_layers", int),
    )
    rope = _rope(hf, fraction=1.0)
    width = hf.need("hidden_size", int) * hf.positive("intermediate_multiple_size", 4)

    def block(out_bias: bool) -> nn.PreNormConfig:
        return nn.PreNormConfig(
            norm=norm,
            attention=gpt_like.attention(hf, dropout=0.1, position=rope, out_bias=out_bias),
            feed_forward=gpt_like.mlp(hf, "gelu", d_ff=width, bias=False),
            dropout=hf.get("hidden_dropout", 0.0),
        )

    last = [n == depth - 1 for n in range(depth)]
    names = ["last" if one else "main" for one in last]
    return llama_like.decoder(hf, [block(one) for one in last], norm, names=names, tied=True)


def intermediate_multiple(data: Data) -> int:
    """Width of the feed-forward, in multiples of the model's width.

    Raises:
        KeyError: the width is not a multiple.
    """
    if data["block"]["feed_forward"]["d_ff"] % data["d_model"]:
        raise KeyError("intermediate_multiple_size")
    return data["block"]["feed_forward"]["d_ff"] // data["d_model"]


JAPANESE = "gpt_neox_japanese.layers.{i}."
HUGGING_FACE = (
    Family(
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        read=read,
        keys=gpt_like.written(gelu_tanh="gelu_fast")
        | ROPE_KEYS
        | {
            "rotary_emb_base": "block.attention.position.theta",
            "rotary_pct": "block.attention.position.fraction",
            "attention_bias": "block.attention.qkv_bias",
            "use_parallel_residual": equals("block.kind", "parallel"),
            "layer_norm_eps": "final_norm.eps",
        },
        rules=(
            same("embedding.tokens", "gpt_neox.embed_in"),
            gpt_like.fused_qkv("gpt_neox.layers.{i}.attention.query_key_value"),
            same("layers.{i}.attention.out_proj", "gpt_neox.layers.{i}.attention.dense"),
            same("layers.{i}.feed_forward.up_proj", "gpt_neox.layers.{i}.mlp.dense_h_to_4h"),
            same("layers.{i}.feed_forward.down_proj", "gpt_neox.layers.{i}.mlp.dense_4h_to_h"),
            same("layers.{i}.attention_norm", "gpt_neox.layers.{i}.input_layernorm"),
            same("layers.{i}.feed_forward_norm", "gpt_neox.layers.{i}.post_attention_layernorm"),
            same("final_norm", "gpt_neox.final_layer_norm"),
            same("head.proj", "embed_out"),
            same("head.proj", "lm_head"),
        ),
        ignored=(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    ),
    Family(
        model_type="gpt_neox_japanese",
        architecture="GPTNeoXJapaneseForCausalLM",
        read=read_japanese,
        keys={key: path for key, path in gpt_like.written().items() if key != "intermediate_size"}
        | ROPE_KEYS
        | {
            "rotary_emb_base": "block.attention.position.theta",
            "rotary_pct": "block.attention.position.fraction",
            "intermediate_multiple_size": intermediate_multiple,
            "layer_norm_eps": "final_norm.eps",
        },
        rules=(
            same("embedding.tokens", "gpt_neox_japanese.embed_in"),
            gpt_like.fused_qkv(JAPANESE + "attention.query_key_value"),
            same("layers.{i}.attention.out_proj.bias", JAPANESE + "attention.dense_bias"),
            same("layers.{i}.attention.out_proj", JAPANESE + "attention.dense"),
            same("layers.{i}.feed_forward.up_proj", JAPANESE + "mlp.dense_h_to_4h"),
            same("layers.{i}.feed_forward.down_proj", JAPANESE + "mlp.dense_4h_to_h"),
            same("layers.{i}.attention_norm", JAPANESE + "input_layernorm"),
            same("layers.{i}.feed_forward_norm", JAPANESE + "post_attention_layernorm"),
            same("final_norm", "gpt_neox_japanese.final_layer_norm"),
            same("head.proj", "embed_out"),
        ),
    ),
)
