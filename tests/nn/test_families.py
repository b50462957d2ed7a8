"""Beside transformers: what the parity of whole families, in `tests/parity`, does not reach."""

import pytest
import torch
import transformers as hf

from tests.nn.grid import error, random_tokens
from tests.nn.reference import LLAMA_RULES, randomise, renamed
from workhorse.nn import DecoderConfig

VOCAB, D_MODEL, D_FF = 31, 16, 24
RMS = {"kind": "rms_norm", "eps": 1e-6}
ROPE = {"kind": "rope", "theta": 100.0}
THEIRS = {
    "vocab_size": VOCAB,
    "hidden_size": D_MODEL,
    "intermediate_size": D_FF,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def ours(block: dict, **changes: object) -> dict:
    """A decoder of two such blocks, LLaMA's but for what is given."""
    attention = {"n_heads": 4, "n_kv_heads": 2, "position": ROPE, **block.pop("attention", {})}
    feed_forward = {"kind": "gated_mlp", "d_ff": D_FF, **block.pop("feed_forward", {})}
    whole = {"kind": "pre_norm", "norm": RMS, **block}
    whole |= {"attention": attention, "feed_forward": feed_forward}
    return {
        "vocab_size": VOCAB,
        "d_model": D_MODEL,
        "n_layers": 2,
        "max_seq_len": 64,
        "blocks": {"main": whole},
        "final_norm": whole["norm"],
        **changes,
    }


LONG = [2.0, 2.5]
BY_LENGTH = {
    "dynamic_ntk": ({"rope_type": "dynamic", "factor": 4.0}, {"factor": 4.0}),
    "longrope": (
        {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.2], "long_factor": LONG},
        {"factor": 4.0, "short_factor": [1.0, 1.2], "long_factor": LONG},
    ),
}


@pytest.mark.parametrize("kind", BY_LENGTH)
@torch.no_grad()
def test_rotations_that_depend_on_the_length(kind: str) -> None:
    """Within and past the original length, whole and token by token with a cache.

    Past it the reference's cached keys keep their angles too.
    """
    theirs, options = BY_LENGTH[kind]
    rope = {**theirs, "rope_theta": 100.0, "original_max_position_embeddings": 8}
    length = 8 if kind == "dynamic_ntk" else 32
    model = randomise(
        hf.LlamaForCausalLM(
            hf.LlamaConfig(**{**THEIRS, "rope_parameters": rope, "max_position_embeddings": length})
        )
    )
    scaling = {"kind": kind, "original_max_seq_len": 8, **options}
    data = ours({"attention": {"position": {**ROPE, "scaling": scaling}}})
    decoder = DecoderConfig.from_dict(data).build().eval()
    decoder.load_state_dict(renamed(model.state_dict(), decoder, LLAMA_RULES))
    tokens = random_tokens(decoder.config, 1, 14)
    for seq in (6, 14):
        assert error(decoder(tokens[:, :seq]), model(tokens[:, :seq]).logits) <= 1e-5
    cache, past = decoder.new_cache(1, 14), None
    for start, stop in ((0, 6), *((n, n + 1) for n in range(6, 14))):
        step = model(tokens[:, start:stop], past_key_values=past, use_cache=True)
        past = step.past_key_values
        assert error(decoder(tokens[:, start:stop], cache=cache), step.logits) <= 1e-5, start
