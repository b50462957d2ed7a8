"""Families with mixtures of experts and latent attention: their logits from their weights."""

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from tests.nn.grid import error, random_tokens
from tests.nn.reference import LLAMA_RULES, Rule, Weights, assert_same_logits, tail
from tests.nn.test_families import D_FF, ROPE, THEIRS, ours
from workhorse.nn import DecoderConfig
from workhorse.nn.moe import MoEConfig

EXPERTS = 8
MIXTURE = {"kind": "moe", "n_experts": EXPERTS, "top_k": 2, "d_ff": 12}
SOFTMAX_OF_CHOSEN = {"score": "softmax", "normalize": True}
SIZES = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}


def mixture(attention: dict | None = None, **fields: object) -> dict:
    """LLaMA's decoder with such a mixture in each layer."""
    data = ours({"attention": attention or {}})
    data["blocks"]["main"]["feed_forward"] = MIXTURE | fields
    return data


def halves(weights: Weights, layer: str, part: str) -> Tensor:
    """Gate or up of all experts, which stand one after the other along the outputs."""
    gate, up = weights[f"model.layers.{layer}.mlp.experts.gate_up_proj"].chunk(2, dim=1)
    return gate if part == "gate" else up


EXPERT_RULES: list[Rule] = [
    (tail(r"feed_forward\.router\.proj"), r"model.layers.\1.mlp.gate"),
    (tail(r"feed_forward\.experts\.(gate|up)_proj"), halves),
    (tail(r"feed_forward\.experts\.down_proj\.weight"), r"model.layers.\1.mlp.experts.down_proj"),
]
RULES = EXPERT_RULES + LLAMA_RULES


def test_mixtral() -> None:
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**{**THEIRS, "intermediate_size": 12, **SIZES}))
    assert_same_logits(model, mixture(router=SOFTMAX_OF_CHOSEN), RULES)


@pytest.mark.parametrize("normalize", [False, True])
def test_qwen2_moe(normalize: bool) -> None:
    """A shared expert of another width behind a gate of its own."""
    model = hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(
            **THEIRS,
            num_experts=EXPERTS,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=20,
            norm_topk_prob=normalize,
            qkv_bias=True,
        )
    )
    data = mixture(
        {"qkv_bias": True},
        router={"score": "softmax", "normalize": normalize},
        shared={"d_ff": 20},
        shared_gate=True,
    )
    rules = [
        (tail(r"feed_forward\.shared_gate"), r"model.layers.\1.mlp.shared_expert_gate"),
        (tail(r"feed_forward\.shared"), r"model.layers.\1.mlp.shared_expert"),
        *RULES,
    ]
    assert_same_logits(model, data, rules)


def test_gpt_oss() -> None:
    """A router with biases, and experts with biases and the clamped gate, gate and up in turns."""
    model = hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **{**THEIRS, "intermediate_size": 12},
            **SIZES,
            head_dim=4,
            layer_types=["full_attention", "full_attention"],
        )
    )
    data = mixture(
        {"qkv_bias": True, "out_bias": True, "sinks": True},
        bias=True,
        clamped={},
        router={**SOFTMAX_OF_CHOSEN, "bias": True},
    )

    def their_experts(weights: Weights, layer: str, name: str, kind: str) -> Tensor:
        tensor = weights[f"model.layers.{layer}.mlp.experts.{name}{'_bias' * (kind == 'bias')}"]
        return tensor.mT if kind == "weight" else tensor

    def gate_or_up(weights: Weights, layer: str, part: str, kind: str) -> Tensor:
        return their_experts(weights, layer, "gate_up_proj", kind)[:, part == "up" :: 2]

    def down(weights: Weights, layer: str, kind: str) -> Tensor:
        return their_experts(weights, layer, "down_proj", kind)

    rules = [
        (tail(r"attention\.kernel\.sinks"), r"model.layers.\1.self_attn.sinks"),
        (tail(r"feed_forward\.router\.proj"), r"model.layers.\1.mlp.router"),
        (tail(r"feed_forward\.experts\.(gate|up)_proj\.(weight|bias)"), gate_or_up),
        (tail(r"feed_forward\.experts\.down_proj\.(weight|bias)"), down),
        *LLAMA_RULES,
    ]
    assert_same_logits(model, data, rules)


def test_phimoe() -> None:
    """The sparse mixer, with a threshold that both keeps and drops rivals."""
    model = hf.PhimoeForCausalLM(
        hf.PhimoeConfig(
            **{**THEIRS, "intermediate_size": 12, "rms_norm_eps": 1e-5},
            **SIZES,
            router_jitter_noise=0.2,
            attention_bias=True,
            lm_head_bias=True,
        )
    )
    norm = {"kind": "layer_norm", "eps": 1e-5}
    data = mixture(
        {"qkv_bias": True, "out_bias": True}, router={"score": "sparsemixer", "jitter": 0.2}
    )
    data["blocks"]["main"]["norm"] = norm
    data |= {"final_norm": norm, "head": {"bias": True}}
    rules = [(tail(r"feed_forward\.router\.proj"), r"model.layers.\1.mlp.router"), *RULES]
    assert_same_logits(model, data, rules)


def latent(heads: int = 4, **fields: object) -> dict:
    return {
        "kind": "latent_attention",
        "n_heads": heads,
        "kv_rank": 10,
        "nope_dim": 6,
        "rope_dim": 4,
        "value_dim": 5,
        "position": {**ROPE, "pairing": "interleaved"},
        "norm": {"eps": 1e-6},
        **fields,
    }


DEEPSEEK = {
    **THEIRS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}


def dense_then_mixture(attention: dict, **fields: object) -> dict:
    """DeepSeek's layers: one with a plain feed-forward, then mixtures."""
    data = mixture(top_k=3, **fields)
    sparse = data["blocks"]["main"] | {"attention": attention}
    dense = sparse | {"feed_forward": {"kind": "gated_mlp", "d_ff": D_FF}}
    return data | {"blocks": {"dense": dense, "sparse": sparse}, "pattern": ["dense", "sparse"]}


def deepseek_rules(data: dict) -> list[Rule]:
    """Keys and values are unfolded by one matrix of theirs, head by head; so are latent and key."""
    widths = data["blocks"]["dense"]["attention"]
    rank, nope = widths["kv_rank"], widths["nope_dim"]

    def down(weights: Weights, layer: str, name: str, kind: str) -> Tensor:
        whole = weights[f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.{kind}"]
        return whole[:rank] if name == "kv_down" else whole[rank:]

    def up(weights: Weights, layer: str, name: str) -> Tensor:
        whole = weights[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        heads = whole.unflatten(0, (widths["n_heads"], -1))
        return (heads[:, :nope] if name == "k" else heads[:, nope:]).flatten(0, 1)

    return [
        (tail(r"attention\.q_down_proj"), r"model.layers.\1.self_attn.q_a_proj"),
        (tail(r"attention\.q_norm"), r"model.layers.\1.self_attn.q_a_layernorm"),
        (tail(r"attention\.q_up_proj"), r"model.layers.\1.self_attn.q_b_proj"),
        (tail(r"attention\.(kv_down|k_rope)_proj\.(weight|bias)"), down),
        (tail(r"attention\.kv_norm"), r"model.layers.\1.self_attn.kv_a_layernorm"),
        (tail(r"attention\.([kv])_up_proj"), up),
        (tail(r"feed_forward\.shared"), r"model.layers.\1.mlp.shared_experts"),
        (
            tail(r"feed_forward\.router\.selection_bias"),
            r"model.layers.\1.mlp.gate.e_score_correction_bias",
        ),
        *RULES,
    ]


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("q_rank", [None, 8])
def test_deepseek_v3(kernel: str, q_rank: int | None) -> None:
    """Sigmoid scores, a bias on the choice, groups by their best two, a scale, YaRN's mscale."""
    scaling = {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 4.0}
    model = hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **DEEPSEEK
            | {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 100.0,
                    "original_max_position_embeddings": 8,
                    **scaling,
                }
            },
            q_lora_rank=q_rank,
            n_shared_experts=2,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
            attention_bias=True,
        )
    )
    set_selection_bias(model)
    attention = latent(
        q_rank=q_rank,
        scale=10**-0.5 * (0.1 * 0.7 * torch.tensor(4.0).log().item() + 1) ** 2,
        qkv_bias=True,
        out_bias=True,
    )
    attention["position"]["scaling"] = {"kind": "yarn", "original_max_seq_len": 8, **scaling}
    data = dense_then_mixture(
        attention,
        shared={"d_ff": 24},
        router={
            "score": "sigmoid",
            "normalize": True,
            "scale": 2.5,
            "n_groups": 4,
            "top_groups": 2,
            "group_score": "top2_sum",
            "selection_bias": True,
        },
    )
    assert_same_logits(model, data, deepseek_rules(data), kernel=kernel)


def set_selection_bias(model: nn.Module) -> None:
    """Large enough to change choices; in theirs it is a buffer, which starts at 0."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor([0.3, -0.4, 0.0, 0.2, -0.1, 0.4, -0.3, 0.1]))


def test_deepseek_v2() -> None:
    """Softmax scores, groups by their best expert, weights as they are."""
    model = hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(
            **DEEPSEEK,
            q_lora_rank=8,
            n_shared_experts=1,
            routed_scaling_factor=1.5,
            topk_method="group_limited_greedy",
        )
    )
    data = dense_then_mixture(
        latent(q_rank=8),
        shared={"d_ff": 12},
        router={"score": "softmax", "scale": 1.5, "n_groups": 4, "top_groups": 2},
    )
    assert_same_logits(model, data, deepseek_rules(data))


@pytest.mark.parametrize("top_k", [1, 2])
def test_llama4_mixture(top_k: int) -> None:
    """The weight multiplies the expert's input, and logits decide where sigmoids are all 1."""
    theirs = hf.models.llama4.modeling_llama4.Llama4TextMoe(
        hf.Llama4TextConfig(
            hidden_size=16,
            intermediate_size=12,
            num_local_experts=EXPERTS,
            num_experts_per_tok=top_k,
        )
    )
    config = MoEConfig.from_dict(
        MIXTURE
        | {"top_k": top_k, "router": {"score": "sigmoid"}, "weigh": "input"}
        | {"shared": {"d_ff": 12}}
    )
    ours = config.build(16)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
        theirs.router.weight.mul_(20)
        gate, up = theirs.experts.gate_up_proj.mT.chunk(2, dim=1)
        ours.router.proj.weight.copy_(theirs.router.weight)
        ours.experts.gate_proj.weight.copy_(gate)
        ours.experts.up_proj.weight.copy_(up)
        ours.experts.down_proj.weight.copy_(theirs.experts.down_proj.mT)
        ours.shared.load_state_dict(theirs.shared_expert.state_dict())
        x = torch.randn(3, 40, 16)
        expected, _ = theirs(x)
        saturated = ours.router(x.flatten(0, 1)).scores.eq(1).sum(dim=-1)
    assert (saturated > top_k).any()
    assert error(ours(x), expected.view_as(x)) <= 1e-5


def test_cached_decoding_of_a_whole_deepseek() -> None:
    """Dense and sparse layers over latents, in steps of several sizes."""
    data = dense_then_mixture(
        latent(q_rank=8), shared={"d_ff": 12}, router={"score": "sigmoid", "normalize": True}
    )
    decoder = DecoderConfig.from_dict(data).build().eval()
    tokens = random_tokens(decoder.config, 2, 12)
    cache = decoder.new_cache(2, 12)
    with torch.no_grad():
        steps = [decoder(piece, cache=cache) for piece in tokens.split([5, 1, 4, 2], dim=1)]
        assert error(torch.cat(steps, dim=1), decoder(tokens)) <= 1e-5
