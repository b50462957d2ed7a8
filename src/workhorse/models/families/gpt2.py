"""GPT-2: Language Models are Unsupervised Multitask Learners (Radford et al., 2019)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family, differs
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import joined, same, then_transposed, transposed


def gpt2(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    vocab_size: int = 50257,
    max_seq_len: int = 1024,
    dropout: float = 0.1,
) -> nn.DecoderConfig:
    """Build a GPT-2 config: GPT with a norm at the input of each sub-layer and before the head."""
    norm = nn.LayerNormConfig(eps=1e-5)
    block = nn.PreNormConfig(
        norm=norm,
        attention=nn.AttentionConfig(
            n_heads=n_heads, qkv_bias=True, out_bias=True, dropout=dropout
        ),
        feed_forward=nn.MlpConfig(d_ff=4 * d_model, activation="gelu_tanh", bias=True),
        dropout=dropout,
    )
    return nn.DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        embedding=nn.EmbeddingConfig(position=nn.LearnedPositionConfig(), dropout=dropout),
        blocks={"main": block},
        final_norm=norm,
        head=nn.HeadConfig(tied=True),
        init=nn.NormalInitConfig(std=0.02, residual="scaled"),
    )


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a GPT-2 config, with transformers' options for scaling the attention scores."""
    hf.ignore("n_ctx", "reorder_and_upcast_attn", "add_cross_attention")
    hf.ignore(*(f"summary_{what}" for what in ("activation", "first_dropout", "proj_to_labels")))
    hf.ignore("summary_type", "summary_use_proj")
    d_model = hf.get("n_embd", 768)
    norm = nn.LayerNormConfig(eps=hf.get("layer_norm_epsilon", 1e-5))
    block = nn.PreNormConfig(
        norm=norm,
        attention=nn.AttentionConfig(
            n_heads=hf.get("n_head", 12),
            qkv_bias=True,
            out_bias=True,
            scale=None if hf.get("scale_attn_weights", True) else 1.0,
            scale_by_layer=hf.get("scale_attn_by_inverse_layer_idx", False),
            dropout=hf.get("attn_pdrop", 0.1),
        ),
        feed_forward=nn.MlpConfig(
            d_ff=hf.optional("n_inner", int) or 4 * d_model,
            activation=llama_like.activation(hf, "activation_function", "gelu_new"),
            bias=True,
        ),
        dropout=hf.get("resid_pdrop", 0.1),
    )
    return nn.DecoderConfig(
        vocab_size=hf.get("vocab_size", 50257),
        d_model=d_model,
        n_layers=hf.get("n_layer", 12),
        max_seq_len=hf.get("n_positions", 1024),
        embedding=nn.EmbeddingConfig(
            position=nn.LearnedPositionConfig(), dropout=hf.get("embd_pdrop", 0.1)
        ),
        blocks={"main": block},
        final_norm=norm,
        head=nn.HeadConfig(tied=hf.get("tie_word_embeddings", True)),
        init=nn.NormalInitConfig(std=hf.get("initializer_range", 0.02), residual="scaled"),
    )


KEYS = {
    "vocab_size": "vocab_size",
    "n_embd": "d_model",
    "n_layer": "n_layers",
    "n_positions": "max_seq_len",
    "n_head": "block.attention.n_heads",
    "n_inner": "block.feed_forward.d_ff",
    "activation_function": llama_like.written_activation(gelu_tanh="gelu_new"),
    "layer_norm_epsilon": "final_norm.eps",
    "tie_word_embeddings": "head.tied",
}
ATTENTION = "layers.{i}.attention."
RULES = (
    same("embedding.tokens", "transformer.wte"),
    same("embedding.positions.table", "transformer.wpe"),
    then_transposed(
        joined(
            (ATTENTION + "q_proj", ATTENTION + "k_proj", ATTENTION + "v_proj"),
            "transformer.h.{i}.attn.c_attn",
        )
    ),
    transposed(ATTENTION + "out_proj", "transformer.h.{i}.attn.c_proj"),
    transposed("layers.{i}.feed_forward.up_proj", "transformer.h.{i}.mlp.c_fc"),
    transposed("layers.{i}.feed_forward.down_proj", "transformer.h.{i}.mlp.c_proj"),
    same("layers.{i}.attention_norm", "transformer.h.{i}.ln_1"),
    same("layers.{i}.feed_forward_norm", "transformer.h.{i}.ln_2"),
    same("final_norm", "transformer.ln_f"),
    same("head.proj", "lm_head"),
)

HUGGING_FACE = (
    Family(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        read=read,
        keys=KEYS
        | {
            "scale_attn_by_inverse_layer_idx": "block.attention.scale_by_layer",
            "scale_attn_weights": differs("block.attention.scale", 1.0),
        },
        rules=RULES,
        ignored=(r".*\.attn\.(bias|masked_bias)",),
    ),
)
