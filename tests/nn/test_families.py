"""Families with LLaMA's names: their logits from their weights, at a small size.

The presets' own families are in `tests/models/test_reference.py`; those here pin the options that
no preset uses yet. Most errors of convention that a formula in a test could share show up here.
"""

import math

import pytest
import torch
import transformers as hf

from tests.nn.grid import error, random_tokens
from tests.nn.reference import LLAMA_RULES, assert_same_logits, randomise, renamed, tail
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


def local_and_global(data: dict, **local: object) -> dict:
    """The first layer with those options of attention, the second without."""
    block = data["blocks"]["main"]
    windowed = {**block, "attention": {**block["attention"], **local}}
    return {**data, "blocks": {"local": windowed, "global": block}, "pattern": ["local", "global"]}


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_llama(kernel: str) -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**THEIRS))
    assert_same_logits(model, ours({}), LLAMA_RULES, kernel=kernel)


def test_olmo2() -> None:
    """Norms on outputs, and one norm over all heads of queries and of keys."""
    norm = {**RMS, "multiply": "before_cast"}
    data = ours(
        {
            "kind": "reordered_norm",
            "norm": norm,
            "attention": {"qk_norm": {"norm": norm, "over": "full"}},
        }
    )
    rules = [
        (tail("attention_norm"), r"model.layers.\1.post_attention_layernorm"),
        (tail("feed_forward_norm"), r"model.layers.\1.post_feedforward_layernorm"),
        (tail(r"attention\.([qk]_norm)\.norm"), r"model.layers.\1.self_attn.\2"),
        *LLAMA_RULES,
    ]
    assert_same_logits(hf.Olmo2ForCausalLM(hf.Olmo2Config(**THEIRS)), data, rules)


def test_gemma2() -> None:
    """Sandwich norms with offset, capped scores and logits, a window in every second layer."""
    model = hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **{**THEIRS, "tie_word_embeddings": True},
            head_dim=6,
            query_pre_attn_scalar=9,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            hidden_activation="gelu_pytorch_tanh",
        )
    )
    data = ours(
        {
            "kind": "sandwich_norm",
            "norm": {**RMS, "offset": True, "multiply": "before_cast"},
            "attention": {"head_dim": 6, "scale": 9**-0.5, "softcap": 2.0},
            "feed_forward": {"activation": "gelu_tanh"},
        },
        embedding={"multiplier": math.sqrt(D_MODEL)},
        head={"tied": True, "cap": 3.0},
    )
    rules = [
        (tail("attention_output_norm"), r"model.layers.\1.post_attention_layernorm"),
        (tail("feed_forward_norm"), r"model.layers.\1.pre_feedforward_layernorm"),
        (tail("feed_forward_output_norm"), r"model.layers.\1.post_feedforward_layernorm"),
        *LLAMA_RULES,
    ]
    assert_same_logits(model, local_and_global(data, window=4), rules)


def test_granite() -> None:
    """Multipliers on embeddings, scores, sub-layers and logits."""
    model = hf.GraniteForCausalLM(
        hf.GraniteConfig(
            **THEIRS,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.6,
            logits_scaling=1.6,
        )
    )
    data = ours(
        {"attention": {"scale": 0.2}, "residual_multiplier": 0.6},
        embedding={"multiplier": 3.0},
        head={"multiplier": 1 / 1.6},
    )
    assert_same_logits(model, data, LLAMA_RULES)


def test_cohere() -> None:
    """Parallel with one norm, interleaved pairs, a norm for each head, a multiplier on logits."""
    theirs = {k: v for k, v in THEIRS.items() if k != "rms_norm_eps"}
    model = hf.CohereForCausalLM(
        hf.CohereConfig(**theirs, layer_norm_eps=1e-5, logit_scale=0.4, use_qk_norm=True)
    )
    norm = {"kind": "layer_norm", "bias": False}
    data = ours(
        {
            "kind": "parallel",
            "norm": norm,
            "attention": {
                "position": {**ROPE, "pairing": "interleaved"},
                "qk_norm": {"norm": norm, "over": "each_head"},
            },
        },
        head={"multiplier": 0.4},
    )
    rules = [
        (tail("norm"), r"model.layers.\1.input_layernorm"),
        (
            tail(r"attention\.([qk])_norm\.heads\.(\d+)\.weight"),
            lambda w, i, part, head: w[f"model.layers.{i}.self_attn.{part}_norm.weight"][int(head)],
        ),
        *LLAMA_RULES,
    ]
    assert_same_logits(model, data, rules)


@pytest.mark.parametrize("parallel", [False, True])
def test_stablelm(parallel: bool) -> None:
    """A quarter of each head turns; norms for each head; biases on q, k and v alone."""
    theirs = {k: v for k, v in THEIRS.items() if k not in ("rms_norm_eps", "rope_parameters")}
    theirs["num_key_value_heads"] = 4
    model = hf.StableLmForCausalLM(
        hf.StableLmConfig(
            **{**theirs, "hidden_size": 32},
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.25,
            },
            layer_norm_eps=1e-5,
            use_qkv_bias=True,
            qk_layernorm=True,
            use_parallel_residual=parallel,
        )
    )
    norm = {"kind": "layer_norm"}
    data = ours(
        {
            "kind": "parallel" if parallel else "pre_norm",
            "norm": norm,
            "attention": {
                "n_kv_heads": 4,
                "position": {**ROPE, "fraction": 0.25},
                "qkv_bias": True,
                "qk_norm": {"norm": {**norm, "bias": False}, "over": "each_head"},
            },
        },
        d_model=32,
    )
    rules = [
        (tail("norm"), r"model.layers.\1.input_layernorm"),
        (
            tail(r"attention\.([qk])_norm\.heads\.(\d+)"),
            r"model.layers.\1.self_attn.\2_layernorm.norms.\3",
        ),
        *LLAMA_RULES,
    ]
    assert_same_logits(model, data, rules)


def test_nemotron() -> None:
    """LayerNorm with an offset, squared ReLU without a gate, half of each head turns."""
    theirs = {k: v for k, v in THEIRS.items() if k not in ("rms_norm_eps", "rope_parameters")}
    model = hf.NemotronForCausalLM(
        hf.NemotronConfig(
            **theirs,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
            norm_eps=1e-5,
            hidden_act="relu2",
        )
    )
    data = ours(
        {
            "norm": {"kind": "layer_norm", "offset": True},
            "attention": {"position": {**ROPE, "fraction": 0.5}},
            "feed_forward": {"kind": "mlp", "activation": "relu2"},
        }
    )
    assert_same_logits(model, data, LLAMA_RULES)


def test_smollm3() -> None:
    """Layers without positions among layers with them."""
    model = hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**THEIRS, no_rope_layers=[0, 1]))
    data = local_and_global(ours({}), position={"kind": "none"})
    assert_same_logits(model, data, LLAMA_RULES)


def test_hunyuan() -> None:
    """Queries and keys are normalised after they were turned."""
    model = hf.HunYuanDenseV1ForCausalLM(hf.HunYuanDenseV1Config(**THEIRS, head_dim=4))
    data = ours({"attention": {"qk_norm": {"norm": RMS, "after_rope": True}}})
    rules = [
        (tail(r"attention\.q_norm"), r"model.layers.\1.self_attn.query_layernorm"),
        (tail(r"attention\.k_norm"), r"model.layers.\1.self_attn.key_layernorm"),
        *LLAMA_RULES,
    ]
    assert_same_logits(model, data, rules)


def test_gpt_oss_with_one_expert() -> None:
    """Sinks, YaRN without rounding, a window in the first layer, the clamped gate."""
    theirs = {k: v for k, v in THEIRS.items() if k != "rope_parameters"}
    scaling = {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False}
    model = hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **theirs,
            head_dim=8,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            num_local_experts=1,
            num_experts_per_tok=1,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "original_max_position_embeddings": 16,
                **scaling,
            },
        )
    )
    position = {**ROPE, "scaling": {"kind": "yarn", "original_max_seq_len": 16, **scaling}}
    data = ours(
        {
            "attention": {
                "head_dim": 8,
                "position": position,
                "qkv_bias": True,
                "out_bias": True,
                "sinks": True,
            },
            "feed_forward": {"kind": "clamped_gated_mlp"},
        }
    )

    def their_expert(weights: dict, layer: str, name: str, kind: str) -> torch.Tensor:
        tensor = weights[f"model.layers.{layer}.mlp.experts.{name}{'_bias' * (kind == 'bias')}"][0]
        return tensor.mT if kind == "weight" else tensor

    def gate_or_up(weights: dict, layer: str, part: str, kind: str) -> torch.Tensor:
        return their_expert(weights, layer, "gate_up_proj", kind)[part == "up" :: 2]

    def down(weights: dict, layer: str, kind: str) -> torch.Tensor:
        return their_expert(weights, layer, "down_proj", kind)

    rules = [
        (tail(r"attention\.kernel\.sinks"), r"model.layers.\1.self_attn.sinks"),
        (tail(r"feed_forward\.(gate|up)_proj\.(\w+)"), gate_or_up),
        (tail(r"feed_forward\.down_proj\.(\w+)"), down),
        *LLAMA_RULES,
    ]
    assert_same_logits(model, local_and_global(data, window=5), rules)


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
