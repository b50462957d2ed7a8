"""Published figures of arithmetic, memory and training cost, recomputed from configs."""

import pytest
import torch

from workhorse.models import preset
from workhorse.models.describe import SCORES, count_parameters, flops_per_token, forward_flops
from workhorse.nn import DecoderConfig
from workhorse.plan import known_devices
from workhorse.plan.subject import BESIROGLU, HOFFMANN, PF_DAY, optima


def megatron(n_layers: int, d_model: int, n_heads: int) -> DecoderConfig:
    """The models of 2205.05198, table 3, with their vocabulary of 51,200."""
    block = {
        "kind": "pre_norm",
        "norm": {"kind": "layer_norm"},
        "attention": {"n_heads": n_heads, "qkv_bias": True, "out_bias": True},
        "feed_forward": {"kind": "mlp", "d_ff": 4 * d_model, "bias": True},
    }
    return DecoderConfig.from_dict(
        {
            "vocab_size": 51_200,
            "d_model": d_model,
            "n_layers": n_layers,
            "max_seq_len": 2048,
            "embedding": {"position": {"kind": "learned"}},
            "blocks": {"main": block},
            "final_norm": {"kind": "layer_norm"},
            "head": {"tied": True},
        }
    )


MEGATRON = {  # layers, width, heads, devices, rows per step, seconds per step, MFU (its table 5)
    "22B": (48, 6144, 64, 8, 4, 1.10, 0.415),
    "175B": (96, 12288, 96, 64, 64, 13.75, 0.514),
    "530B": (105, 20480, 128, 280, 280, 37.83, 0.560),
    "1T": (128, 25600, 160, 512, 512, 71.49, 0.563),
}
A100 = known_devices()["a100"].peak(torch.bfloat16)


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_arithmetic_and_utilization(name: str) -> None:
    n_layers, h, n_heads, devices, batch, seconds, mfu = MEGATRON[name]
    s, vocab = 2048, 51_200
    flops = flops_per_token(megatron(n_layers, h, n_heads).build(device="meta"), s) * batch * s
    # 2205.05198 appendix A, equation 7.
    theirs = 72 * batch * n_layers * s * h**2 * (1 + s / (6 * h) + vocab / (12 * h * n_layers))
    assert flops == pytest.approx(theirs, rel=1e-12)
    assert flops / (seconds * devices * A100) == pytest.approx(mfu, abs=0.002)


def test_selective_recomputation() -> None:
    # 2205.05198 §5: the attention core has 70 % and 65 % of the activations of GPT-3 and MT-NLG,
    # 5 · a · s / h in addition to 34. Recomputing it costs 2.7 % and 1.6 % more arithmetic.
    for name, of_memory, of_arithmetic in (("175B", 0.70, 0.027), ("530B", 0.65, 0.016)):
        n_layers, h, n_heads, *_ = MEGATRON[name]
        flops = forward_flops(megatron(n_layers, h, n_heads).build(device="meta"), 2048)
        layers = sum(flops.values()) - flops["head"]
        assert flops[SCORES] / layers == pytest.approx(of_arithmetic, abs=0.0005)
        core = 5 * n_heads * 2048 / h
        assert core / (core + 34) == pytest.approx(of_memory, abs=0.005)


def test_mt_nlg_throughput() -> None:
    # 2201.11990 §2.4: 126, 121 and 113 teraFLOP/s per A100, with 1,920 rows per step. Every layer's
    # forward pass counts twice, because it is recomputed.
    flops = forward_flops(megatron(*MEGATRON["530B"][:3]).build(device="meta"), 2048)
    of_step = (4 * sum(flops.values()) - flops["head"]) * 1920 * 2048
    for devices, seconds, rate in ((2240, 60.1, 126), (2800, 50.2, 121), (3360, 44.4, 113)):
        assert of_step / (devices * seconds) / 1e12 == pytest.approx(rate, rel=0.005)


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_sizes(name: str) -> None:
    printed = {"22B": 22e9, "175B": 175e9, "530B": 530e9, "1T": 1e12}  # 2205.05198 table 3
    counted = count_parameters(megatron(*MEGATRON[name][:3]))["total"]
    assert counted == pytest.approx(printed[name], rel=0.01)


def test_palm_utilization() -> None:
    # 2204.02311 appendix B: 238,300 tokens per second on 6,144 TPU v4, 46.2 % of their peak.
    flops = flops_per_token(preset("palm-540b").build(device="meta"), 2048)
    peak = known_devices()["tpu-v4"].peak(torch.bfloat16)
    assert flops * 238_300 / (6144 * peak) == pytest.approx(0.462, abs=0.001)


def test_gpt3_training_compute() -> None:
    # 2005.14165 table D.1: 3.14e23 FLOPs and 3,640 petaflop/s-days for 300 billion tokens: 6 per
    # parameter and token, without the matmuls of attention, printed to three digits.
    flops = forward_flops(preset("gpt3-175b").build(device="meta"), 2048)
    without = 3 * 300e9 * (sum(flops.values()) - flops[SCORES])
    assert without == pytest.approx(3.14e23, rel=0.001)
    assert without / PF_DAY == pytest.approx(3640, rel=0.002)


@pytest.mark.parametrize(
    ("name", "hours", "utilization"),
    [("llama-2-7b", 184_320, 0.445), ("llama-2-70b", 1_720_320, 0.460)],
)
def test_llama_2_cost(name: str, hours: int, utilization: float) -> None:
    # 2307.09288 table 2: A100 hours for 2.0 trillion tokens, in sequences of 4,096. The paper gives
    # no utilization; these values are in docs/plan.md.
    flops = flops_per_token(preset(name).build(device="meta"), 4096) * 2e12
    assert flops / (hours * 3600 * A100) == pytest.approx(utilization, abs=0.001)


def test_chinchilla() -> None:
    # 2203.15556: exponents of table 2, the budget of Gopher in table A3 and its optimum.
    assert HOFFMANN.beta / (HOFFMANN.alpha + HOFFMANN.beta) == pytest.approx(0.46, abs=0.01)
    twenty = next(law for law in optima(5.76e23) if "20 tokens" in law.law)
    assert twenty.parameters == pytest.approx(67e9, rel=0.05)
    assert twenty.tokens == pytest.approx(1.5e12, rel=0.1)
    # 2404.10102: the refitted parametric law also gives about 20 tokens per parameter.
    parameters, tokens = BESIROGLU.optimum(5.76e23)
    assert tokens / parameters == pytest.approx(20, rel=0.15)


def test_a_law_is_the_minimum_of_its_loss() -> None:
    for law in (HOFFMANN, BESIROGLU):
        parameters, tokens = law.optimum(1e21)
        assert 6 * parameters * tokens == pytest.approx(1e21)
        best = law.loss(parameters, tokens)
        for factor in (0.8, 1.25):
            assert law.loss(parameters * factor, tokens / factor) > best


def test_kaplan() -> None:
    # 2001.08361 table 6: the optimum for a petaflop/s-day is 1.3e9 parameters and 2e10 tokens.
    kaplan = optima(PF_DAY)[0]
    assert (kaplan.parameters, kaplan.tokens) == (1.3e9, 2e10)
