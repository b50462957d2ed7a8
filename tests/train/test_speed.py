"""The FLOP count of a step compared with PyTorch's counter, and the peak rate."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.train.conftest import MODEL
from workhorse.data import Batch
from workhorse.models.describe import active_parameters, flops_per_token
from workhorse.nn import Decoder, DecoderConfig
from workhorse.run import train
from workhorse.train import read_metrics, speed
from workhorse.train.objectives.next_token import NextToken
from workhorse.train.speed import Peak, peak_flops

SEQ, VOCAB = 32, 24
ROWS = 2
MIXTURE = {
    "kind": "moe",
    "n_experts": 4,
    "top_k": 2,
    "d_ff": 8,
    "shared": {"kind": "gated_mlp", "d_ff": 8, "activation": "silu"},
    "shared_gate": True,
}
LATENT = {
    "kind": "latent_attention",
    "n_heads": 2,
    "q_rank": 6,
    "kv_rank": 8,
    "nope_dim": 8,
    "rope_dim": 4,
    "value_dim": 5,
}


def build(attention: dict[str, Any], feed_forward: dict[str, Any] | None = None) -> Decoder:
    main = MODEL["blocks"]["main"]
    block = {**main, "attention": attention, "feed_forward": feed_forward or main["feed_forward"]}
    fields = {**MODEL, "blocks": {"main": block}, "vocab_size": VOCAB, "max_seq_len": SEQ}
    return DecoderConfig.from_dict(fields).build("eager")


def counted_by_pytorch(decoder: Decoder) -> int:
    """Count a forward and backward pass of a few rows with the kernel that writes all scores."""
    tokens = torch.randint(VOCAB, (ROWS, SEQ))
    with FlopCounterMode(display=False) as counter:
        rows = Batch(tokens, tokens, None, torch.zeros(ROWS))
        NextToken(decoder).train()(rows).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "attention",
    [
        {"n_heads": 2},
        {"n_heads": 4, "n_kv_heads": 2, "qkv_bias": True, "output_gate": True},
        {"n_heads": 2, "head_dim": 12, "value_dim": 6},
        {"n_heads": 2, "causal": False},
        LATENT,
        {**LATENT, "q_rank": None},
    ],
)
def test_a_steps_arithmetic_is_what_pytorch_counts(attention: dict[str, Any]) -> None:
    decoder = build({"kind": "attention", **attention})
    assert flops_per_token(decoder, SEQ) * ROWS * SEQ == counted_by_pytorch(decoder)


@pytest.mark.parametrize("reach", [{"window": 8}, {"chunk": 8}])
def test_what_a_window_hides_does_not_count(reach: dict[str, int]) -> None:
    """PyTorch counts all 32 keys per query, as `eager` computes them, but only 8 are visible.

    Each key costs 2 heads of 8 elements for scores and again for outputs, in two layers.
    """
    decoder = build({"kind": "attention", "n_heads": 2, **reach})
    hidden = (SEQ - 8) * 2 * (8 + 8) * 6 * 2 * ROWS * SEQ
    ours = flops_per_token(decoder, SEQ) * ROWS * SEQ
    assert ours == counted_by_pytorch(decoder) - hidden
    whole = build({"kind": "attention", "n_heads": 2})
    assert flops_per_token(decoder, 8) == flops_per_token(whole, 8)


def test_a_mixture_counts_the_experts_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch does not count its grouped kernel, so the matmul of each expert is separate here."""
    monkeypatch.setattr("workhorse.nn.experts.mixture._kernel_takes", lambda weight: False)
    decoder = build({"kind": "attention", "n_heads": 2}, MIXTURE)
    assert flops_per_token(decoder, SEQ) * ROWS * SEQ == counted_by_pytorch(decoder)
    resting = 2 * 2 * 3 * 8 * 16  # layers, experts, matrices of 8 x 16
    total = sum(parameter.numel() for parameter in decoder.parameters())
    assert active_parameters(decoder.config) == total - resting
    dense = build({"kind": "attention", "n_heads": 2})
    everything = sum(parameter.numel() for parameter in dense.parameters())
    assert active_parameters(dense.config) == everything


def test_no_fraction_of_the_peak_passes_one() -> None:
    measured = iter([100.0, 90.0, 300.0])
    peak = Peak(lambda: next(measured))
    assert peak.fraction(50.0) == 0.5
    assert peak.fraction(120.0) == 1.0  # the second probe was slower than training
    assert peak.fraction(60.0) == 0.5
    assert peak.fraction(150.0) == 0.5  # the third shows that the first two were disturbed


def test_probing_leaves_the_random_numbers_alone() -> None:
    """Measuring the peak again during a run does not change the run's random numbers."""
    before = torch.get_rng_state()
    assert peak_flops(torch.device("cpu"), torch.float32) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_the_speed_of_the_first_step_stands_apart(make_recipe, tmp_path, monkeypatch) -> None:
    """The clock advances by a second per reading, and by an hour in the first step."""
    clock = {"now": 0.0}

    def tick() -> float:
        clock["now"] += 1
        return clock["now"]

    real, calls = NextToken.forward, 0

    def slow_at_first(self, rows):
        nonlocal calls
        calls += 1
        clock["now"] += 3600 if calls == 1 else 0
        return real(self, rows)

    monkeypatch.setattr("workhorse.train.loop.time.perf_counter", tick)
    monkeypatch.setattr(speed, "PROBE_SIZES", {"cpu": (8,)})
    monkeypatch.setattr(NextToken, "forward", slow_at_first)
    for every in (5, 1):
        calls = 0
        train(make_recipe(log_every=every, steps=10), tmp_path / f"run{every}")
        events = read_metrics(tmp_path / f"run{every}/metrics.jsonl")
        steps = [event for event in events if event["kind"] == "step"]
        slow = [event["step"] for event in steps if event["tokens_per_second"] < 1]
        marked = [event["step"] for event in steps if event["warming_up"]]
        assert slow == marked == ([1] if every == 1 else [])
