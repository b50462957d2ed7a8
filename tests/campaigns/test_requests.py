"""Campaign: requests that start and end at random give the tokens of separate runs.

    make campaign-requests

It covers 1 to 32 sequences at a time, common prefixes, prefill in pieces, and cancellations; in
float32 and bfloat16, with native operators and with PyTorch's. Requests with `exact` have every
token and every bit of every log-probability of the request alone: a thousand in passes of their
own, and ten thousand of invariant decoders, also quantised, in the same passes. For other requests,
the number of tokens with bitwise equal log-probabilities is printed. Their tokens may differ if two
tokens are as near to each other as the rounding of a batch's shape.
"""

import math
import random
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.native.machine import decode_natively
from workhorse.execute.backend import Backend, backend_of
from workhorse.generate import Completion, Delta, Engine, GenerationConfig, generate
from workhorse.generate.sequence import PIECE
from workhorse.nn import DecoderConfig
from workhorse.transforms.quantization import FormatName, quantize

pytestmark = pytest.mark.campaign
REQUESTS = 1000
VOCAB = 96
HOW: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "speculate": 3},
    {"temperature": 0.8, "top_k": 20},
]
PRECISIONS: dict[str, tuple[torch.dtype, FormatName | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, "int8"),
    "int4": (torch.bfloat16, "int4"),
}
NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.25}
"""Largest distance, in nats, between two tokens that rounding may swap."""
CONFIG = DecoderConfig.from_dict(
    {
        "vocab_size": VOCAB,
        "d_model": 64,
        "n_layers": 3,
        "max_seq_len": 320,
        "blocks": {
            name: {
                "kind": "pre_norm",
                "norm": {"kind": "rms_norm"},
                "attention": {
                    "n_heads": 4,
                    "n_kv_heads": 2,
                    "position": {"kind": "rope"},
                    "window": window,
                },
                "feed_forward": {"kind": "gated_mlp", "d_ff": 128, "activation": "silu"},
            }
            for name, window in (("whole", None), ("window", 40))
        },
        "pattern": ["whole", "window", "whole"],
        "final_norm": {"kind": "rms_norm"},
        "init": {"kind": "normal", "std": 0.3},
    }
)


@dataclass
class Asked:
    """A request, and its results."""

    prompt: list[int]
    config: GenerationConfig
    deltas: list[Delta] = field(default_factory=list)
    cancelled: bool = False


def requests(
    pick: random.Random, *, exact: bool, count: int = REQUESTS, guesses: bool = True
) -> list[Asked]:
    beginnings = [[pick.randrange(VOCAB) for _ in range(pick.randint(20, 270))] for _ in range(6)]
    asked: list[Asked] = []
    for seed in range(count):
        prompt = pick.choice([[], [], *beginnings])[: pick.choice([None, 33, 2 * PIECE])]
        prompt = prompt + [pick.randrange(VOCAB) for _ in range(pick.randint(1, 20))]
        how = pick.choice([how for how in HOW if guesses or "speculate" not in how])
        asked.append(
            Asked(
                prompt,
                GenerationConfig(
                    max_new_tokens=pick.randint(1, 30),
                    stop_tokens=(0,),
                    seed=seed,
                    logprobs=VOCAB,
                    exact=exact,
                    **how,
                ),
            )
        )
    return asked


def run(backend: Backend, asked: list[Asked], pick: random.Random) -> None:
    """Run all requests, and cancel some. Few and many arrive at a time, in turn."""
    by_result: dict[int, Asked] = {}
    engine = Engine(
        backend,
        max_sequences=32,
        max_tokens=3000,  # so that some are preempted
        speculate=max(request.config.speculate for request in asked),
        token_budget=PIECE + 32,
        prefix_caching=True,
    )
    waiting, steps = list(asked), 0
    while waiting or not engine.is_idle:
        steps += 1
        arriving = pick.choice([0, 0, 1, 2, 9] if steps % 400 < 200 else [0] * 20 + [1])
        for _ in range(min(len(waiting), arriving)):
            request = waiting.pop()
            (result,) = engine.add(request.prompt, request.config)
            by_result[result] = request
        for delta in engine.step():
            by_result[delta.index].deltas.append(delta)
        if by_result and pick.random() < 0.05:
            result, request = pick.choice(list(by_result.items()))
            engine.cancel(result)
            request.cancelled = True


def between_logits(logprobs: dict[int, float], found: int, expected: int) -> float:
    """Distance of two tokens, in nats."""
    return abs(logprobs[found] - logprobs[expected])


def between_draws(logprobs: dict[int, float], found: int, expected: int) -> float:
    """Smallest distance of the random draw from the value where the other token is drawn.

    Draws go through the tokens by id, with the options of `HOW` through the 20 most likely.
    """
    least = sorted(logprobs.values())[-20]
    weights = {token: math.exp(p / 0.8) for token, p in logprobs.items() if p >= least}
    first, last = sorted((found, expected))
    passed = sum(weight for token, weight in weights.items() if first < token < last)
    return passed / sum(weights.values())


def agreement(request: Asked, alone: Completion, near: float) -> tuple[int, int]:
    """Number of tokens that agree up to the end or a near tie, and of those that do bitwise."""
    assert alone.logprobs is not None
    bits = 0
    for n, (delta, expected) in enumerate(zip(request.deltas, alone.logprobs, strict=False)):
        assert delta.logprob is not None
        if delta.token != expected.token:
            apart = between_draws if request.config.samples else between_logits
            assert apart(dict(expected.top), delta.token, expected.token) <= near
            return n, bits
        assert abs(delta.logprob.logprob - expected.logprob) <= near
        bits += delta.logprob.logprob == expected.logprob
    assert len(request.deltas) == len(alone.tokens) or request.cancelled
    return len(request.deltas), bits


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("native", [True, False], ids=["native", "PyTorch"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "together"])
def test_a_thousand_requests(
    native: bool, dtype: torch.dtype, exact: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    backend = backend_of(CONFIG.build(dtype=dtype).eval())
    if native:
        backend = decode_natively(backend.decoder)
    pick = random.Random(1)
    asked = requests(pick, exact=exact, guesses=not exact)
    run(backend, asked, pick)
    tokens = bits = same = 0
    for request in asked:
        (alone,) = generate(backend, [request.prompt], request.config)
        agreed, to_the_bit = agreement(request, alone, NEAR[dtype])
        tokens, bits = tokens + agreed, bits + to_the_bit
        same += [delta.token for delta in request.deltas] == list(alone.tokens)[
            : len(request.deltas)
        ]
    with capsys.disabled():
        print(
            f"\n{dtype}, native {native}, exact {exact}: {same} of {len(asked)} completions equal, "
            f"{sum(request.cancelled for request in asked)} cancelled; "
            f"{bits} of {tokens} log-probabilities to the bit"
        )
    if exact:
        assert (same, bits) == (len(asked), tokens)
    elif dtype == torch.float32:  # bfloat16 rounds often enough that near ties are common
        assert same >= 0.99 * len(asked)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ten_thousand_requests_of_invariant_decoders(
    precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dtype, format = PRECISIONS[precision]
    rates, backends = [], []
    for exact in (False, True):
        torch.manual_seed(0)
        decoder = CONFIG.build(dtype=dtype).eval()
        if format is not None:
            quantize(decoder, format)
        backend = decode_natively(decoder, exact=exact)
        if exact and not backend.is_invariant:
            pytest.skip("there are no native steps here")
        pick = random.Random(1)
        asked = requests(pick, exact=True, count=2500)
        for request in asked:
            request.config = request.config.replace(exact=exact)
        run(backend, asked[:100], random.Random(0))  # not timed
        for request in asked:
            request.deltas.clear()
            request.cancelled = False
        started = time.process_time()
        run(backend, asked, pick)
        seconds = time.process_time() - started
        rates.append(sum(len(request.deltas) for request in asked) / seconds)
        backends.append(backend)
    differing = 0
    for request in asked:
        (alone,) = generate(backends[-1], [request.prompt], request.config.replace(speculate=0))
        assert alone.logprobs is not None
        expected = list(zip(alone.tokens, alone.logprobs, strict=True))
        found = [(delta.token, delta.logprob) for delta in request.deltas]
        differing += found != expected[: len(found)]
        differing += len(found) < len(expected) and not request.cancelled
    with capsys.disabled():
        print(
            f"\n{precision}: {differing} of {len(asked)} completions differ, "
            f"{sum(request.cancelled for request in asked)} cancelled; {rates[1]:,.0f} tokens/s, "
            f"not exact {rates[0]:,.0f} tokens/s"
        )
    assert differing == 0
