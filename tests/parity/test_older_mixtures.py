"""Files of ERNIE and Hunyuan as they were published: keys of transformers 4, and idle ones."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers as hf

from tests.parity.reference import quiet
from workhorse.models.huggingface import Fields, family
from workhorse.models.huggingface.family import differences, plain

SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rope_theta": 500.0,
    "torch_dtype": "bfloat16",
    "pad_token_id": 0,
}
ALPHA = {
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "type": "dynamic",
}
HUNYUAN = {
    "attention_head_dim": 8,
    "cla_share_factor": 2,
    "eod_token_id": 3,
    "head_dim": 8,
    "mlp_bias": False,
    "norm_type": "rms",
    "org_vocab_size": 67,
    "pad_id": 0,
    "rope_scaling": ALPHA,
    "use_cla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}
FILES: dict[str, dict[str, Any]] = {
    "ernie4_5": {"head_dim": 8, "rope_scaling": None, "use_bias": False},
    "ernie4_5_moe": {
        "moe_capacity": [8, 8, 8],
        "moe_gate": "topk",
        "moe_intermediate_size": 12,
        "moe_k": 2,
        "moe_layer_end_index": -1,
        "moe_num_experts": 8,
        "moe_use_aux_free": True,
        "num_nextn_predict_layers": 1,
        "rope_scaling": None,
    },
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": HUNYUAN
    | {
        "moe_drop_tokens": False,
        "moe_intermediate_size": [40] * 3,
        "moe_layer_num_skipped": 0,
        "moe_topk": [2] * 3,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_shared_expert": [1] * 3,
        "use_mixed_mlp_moe": True,
    },
}


@pytest.mark.parametrize("model_type", FILES)
def test_a_published_form_means_what_transformers_reads_in_it(model_type: str) -> None:
    file = {"model_type": model_type, **SMALL, **FILES[model_type]}
    with quiet():
        parsed = hf.AutoConfig.for_model(**deepcopy(file)).to_dict()  # it writes into mappings
    fields = Fields(file)
    ours = family(model_type).read(fields)
    theirs = family(model_type).read(Fields(parsed))
    assert list(differences(plain(ours), plain(theirs))) == []
    assert fields.unused() == []


def test_alpha_turns_a_head_as_in_transformers() -> None:
    """Angles of a published form, whatever the length: theta is what `alpha` makes of it."""
    file = {"model_type": "hunyuan_v1_dense", **SMALL, **HUNYUAN}
    rope = family("hunyuan_v1_dense").read(Fields(file)).blocks["main"].attention.position
    with quiet():
        model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(**deepcopy(file)))
    turns = rope.angles(torch.tensor([[1]]), head_dim=8, length=1)
    expected = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(turns[1].flatten(), expected.sin())
    assert not rope.depends_on_length
