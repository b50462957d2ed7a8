"""A.X K1 (SK Telecom, 2026)."""

from workhorse import nn
from workhorse.models.families.deepseek import DEEPSEEK_KEYS, DEEPSEEK_RULES
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import same, zeros


def read(hf: Fields) -> nn.DecoderConfig:
    """Read an A.X K1 config: DeepSeek-V3 with a further norm after each mixture of experts."""
    hf.ignore("aux_loss_alpha", "ep_size", "num_nextn_predict_layers", "seq_aux")  # for training
    hf.refuse("scoring_func", "sigmoid", "A.X K1 uses sigmoid scores")
    norm = llama_like.rms_norm(hf)
    neighbours = hf.optional("rope_interleave", bool, True) or False
    heads = llama_like.latent_attention(hf, neighbours=neighbours).replace(
        q_rank=hf.get("q_lora_rank", 1536)  # null means the default here
    )
    mixture = mixtures.sigmoid_mixture(
        hf, n_experts=192, top_k=8, d_ff=2048, scale=2.5, n_group=8, topk_group=4
    ).replace(output_norm=norm)
    dense = llama_like.gated_mlp(hf, d_ff=hf.get("intermediate_size", 18432))
    kinds = mixtures.mlp_layer_types(hf, _older_layer_types(hf))
    layers = [
        nn.PreNormConfig(
            norm=norm, attention=heads, feed_forward=mixture if kind == mixtures.SPARSE else dense
        )
        for kind in kinds
    ]
    return llama_like.decoder(hf, layers, norm, names=kinds)


def _older_layer_types(hf: Fields) -> list[str]:
    """Read from keys of older files which layers have a mixture: index of the first, and period."""
    first, period = hf.get("first_k_dense_replace", 1), hf.positive("moe_layer_freq", 1)
    return [
        mixtures.SPARSE if n >= first and n % period == 0 else mixtures.DENSE
        for n in range(hf.need("num_hidden_layers", int))
    ]


HUGGING_FACE = (
    Family(
        model_type="axk1",
        architecture="AXK1ForCausalLM",
        read=read,
        keys={
            key: place
            for key, place in (DEEPSEEK_KEYS | llama_like.PAIRING_KEYS).items()
            if key != "first_k_dense_replace"
        }
        | {"mlp_layer_types": mixtures.written_mlp_layer_types},
        rules=(
            *DEEPSEEK_RULES,
            same(mixtures.FEED_FORWARD + "output_norm", "model.layers.{i}.post_mlp_layernorm"),
            zeros(
                mixtures.FEED_FORWARD + "router.selection_bias"
            ),  # missing from the published files
        ),
        ignored=(  # the published files have unused norms in the dense layers
            r".*\.rotary_emb\.inv_freq",
            r"model\.layers\.\d+\.post_mlp_layernorm\.weight",
        ),
    ),
)
