"""GPT-J-6B (Wang and Komatsuzaki, 2021) and CodeGen (2203.13474)."""

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.models.huggingface import gpt_like, llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, interleaved_by, same


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a GPT-J config: parallel blocks with one norm, and RoPE on a part of each head.

    RoPE pairs adjacent features.
    """
    hf = hf.renamed(gpt_like.GPT_NAMES)
    hf.ignore("n_ctx", *gpt_like.SUMMARY_KEYS)
    hf.refuse("rotary", True, "transformers ignores it")
    hf.refuse("scale_attn_weights", True, "transformers ignores it")
    norm = nn.LayerNormConfig(eps=hf.get("layer_norm_epsilon", 1e-5))
    head_dim = hf.need("hidden_size", int) // hf.need("num_attention_heads", int)
    turned = hf.get("rotary_dim", 64)
    if not 0 < turned <= head_dim:
        raise ConfigError(
            f"{hf.where}: rotary_dim={turned} does not fit a head of width {head_dim}; "
            "choose an even number up to that width"
        )
    block = nn.ParallelConfig(
        norm=norm,
        attention=gpt_like.attention(
            hf,
            position=nn.RopeConfig(fraction=turned / head_dim, pairing="interleaved"),
        ),
        feed_forward=gpt_like.mlp(hf, "gelu_new", d_ff=gpt_like.d_ff_or_fourfold(hf)),
        dropout=hf.get("hidden_dropout", 0.0),
    )
    embedding = nn.EmbeddingConfig(dropout=hf.get("embedding_dropout", 0.0))
    return llama_like.decoder(hf, block, norm, embedding=embedding, head={"bias": True})


def read_codegen(hf: Fields) -> nn.DecoderConfig:
    """Read a CodeGen config: GPT-J, with q, k and v projections stored in `MACHINES` pieces."""
    config = read(hf)
    heads = config.blocks["main"].attention.n_heads
    if heads % MACHINES:
        raise ConfigError(
            f"{hf.where}: n_head={heads} is not divisible by {MACHINES}, the number of pieces of "
            "CodeGen's stored projections; choose a multiple"
        )
    return config


def rotary_dim(data: Data) -> int:
    """Number of features per head that RoPE rotates."""
    attention = data["block"]["attention"]
    return int(attention["head_dim"] * attention["position"]["fraction"])


MACHINES = 4
"""Number of pieces of CodeGen's stored q, k and v projections, one for each machine that trained
CodeGen. transformers hard-codes the same number."""
KEYS = gpt_like.written(gpt_like.GPT_NAMES, gelu_tanh="gelu_new") | {
    "rotary_dim": rotary_dim,
    "layer_norm_epsilon": "final_norm.eps",
}
OURS, THEIRS = "layers.{i}.attention.", "transformer.h.{i}.attn."
RULES = (
    same("embedding.tokens", "transformer.wte"),
    same(OURS + "q_proj", THEIRS + "q_proj"),
    same(OURS + "k_proj", THEIRS + "k_proj"),
    same(OURS + "v_proj", THEIRS + "v_proj"),
    same(OURS + "out_proj", THEIRS + "out_proj"),
    same("layers.{i}.feed_forward.up_proj", "transformer.h.{i}.mlp.fc_in"),
    same("layers.{i}.feed_forward.down_proj", "transformer.h.{i}.mlp.fc_out"),
    same("layers.{i}.norm", "transformer.h.{i}.ln_1"),
    same("final_norm", "transformer.ln_f"),
    same("head.proj", "lm_head"),
)
BUFFERS = (r".*\.attn\.(bias|masked_bias|causal_mask)",)

HUGGING_FACE = (
    Family(
        model_type="gptj",
        architecture="GPTJForCausalLM",
        read=read,
        keys=KEYS,
        rules=RULES,
        ignored=BUFFERS,
    ),
    Family(
        model_type="codegen",
        architecture="CodeGenForCausalLM",
        read=read_codegen,
        keys=KEYS,
        rules=instead(
            interleaved_by(
                (OURS + "q_proj", OURS + "v_proj", OURS + "k_proj"),
                THEIRS + "qkv_proj",
                groups=lambda block: MACHINES,
            ),
            *RULES[4:],
            base=RULES[:1],
        ),
        ignored=BUFFERS,
    ),
)
