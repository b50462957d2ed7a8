"""Guesses drawn from a draft do not change the target's distribution of completions."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from workhorse.generate import GenerationConfig, generate, sampling, speculation
from workhorse.generate.request import Request
from workhorse.generate.sampling import after_guess


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.booleans(), st.booleans())
def test_after_guess_follows_the_target(seed, sparse_target, sparse_draft):
    """Probabilities summed over all guesses and a grid of uniforms equal the target's."""
    generator = torch.Generator().manual_seed(seed)

    def distribution(sparse: bool) -> torch.Tensor:
        weights = torch.rand(5, generator=generator, dtype=torch.float64)
        return (weights * (weights > 0.4) if sparse else weights) + (
            1e-300 if sparse and not (weights > 0.4).any() else 0
        )

    target, draft = distribution(sparse_target), distribution(sparse_draft)
    target, draft = target / target.sum(), draft / draft.sum()
    grid = 100
    total = torch.zeros(5, dtype=torch.float64)
    for token in range(5):
        if draft[token] == 0:
            continue
        for step in range(grid):
            weights = after_guess(target, token, draft, (step + 0.5) / grid)
            assert (weights >= 0).all()
            total += draft[token] * weights / weights.sum() / grid
    assert_close(total, target, atol=2 / grid, rtol=0)


def test_equal_distributions_up_to_rounding_leave_something_to_draw():
    target = torch.tensor([0.5, 0.5], dtype=torch.float64)
    draft = target.clone()
    draft[0] += 2**-50
    weights = after_guess(target, 0, draft, 1 - 2**-53)
    assert torch.equal(weights, target)


class Paths:
    """Runs a sampling function once for each possible outcome of its draws, with probability."""

    def __init__(self) -> None:
        self.script: list[int] = []
        self.taken: list[tuple[int, int]] = []  # choice, number of choices
        self.probability = 1.0

    def branch(self, chances: list[float]) -> int:
        """Return one of the choices whose probability is above 0."""
        possible = [n for n, chance in enumerate(chances) if chance > 0]
        place = len(self.taken)
        pick = self.script[place] if place < len(self.script) else 0
        self.taken.append((pick, len(possible)))
        self.probability *= chances[possible[pick]]
        return possible[pick]

    def draw_from(self, weights, uniforms):
        rows = [(row / row.sum()).tolist() for row in weights]
        return torch.tensor([self.branch(row) for row in rows])

    def all(self, run):
        while True:
            self.taken, self.probability = [], 1.0
            yield run(), self.probability
            while self.taken and self.taken[-1][0] + 1 == self.taken[-1][1]:
                self.taken.pop()
            if not self.taken:
                return
            pick, _ = self.taken.pop()
            self.script = [choice for choice, _ in self.taken] + [pick + 1]


class Undecided(float):
    """A uniform number that is below a threshold in one branch and not in the other."""

    paths: Paths

    def __mul__(self, q):
        scaled = Undecided(0)
        scaled.paths, scaled.q = self.paths, q.item()
        return scaled

    def __lt__(self, p):
        accept = min(1.0, p.item() / self.q)
        return self.paths.branch([1 - accept, accept]) == 1


@torch.no_grad()
def distribution_of(decoder, prompt, config) -> dict[tuple[int, ...], float]:
    """Probabilities of all completions, by the chain rule and full forward passes."""
    shape, found, growing = sampling.shaping(config), {}, {(): 1.0}
    while growing:
        new, probability = growing.popitem()
        if len(new) == config.max_new_tokens or (new and new[-1] in (config.stop_tokens or ())):
            found[new] = probability
            continue
        history = sampling.History.of([prompt], decoder.config.vocab_size, torch.device("cpu"))
        for token in new:
            history.add(torch.tensor([token]))
        logits = decoder(torch.tensor([[*prompt, *new]]))[:, -1]
        chances = shape(logits, history)[0].softmax(-1, dtype=torch.float64).tolist()
        growing |= {(*new, t): probability * p for t, p in enumerate(chances) if p > 0}
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "temperature": 1.5},
        {"top_p": 0.6, "presence_penalty": 1.0, "logit_bias": {1: 0.5}},
        {"min_p": 0.75, "temperature": 1.2, "stop_tokens": (2,)},
    ],
)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_probability_of_every_text_is_the_target_s(make_decoder, monkeypatch, options, n):
    """Exact test: every possible outcome of the draws is run, and the probabilities are summed."""
    decoder, draft = make_decoder(vocab_size=5), make_decoder(vocab_size=5, seed=3)
    with torch.no_grad():  # both flat enough for guesses to be accepted and rejected
        for weights in (decoder.head.proj.weight, draft.head.proj.weight):
            weights.mul_(0.3)
    config = GenerationConfig(max_new_tokens=4, speculate=n, **options)
    paths = Paths()

    def undecided(row):
        uniform = Undecided(0)
        uniform.paths = paths
        return uniform

    monkeypatch.setattr(Request, "uniform", undecided)
    for module in (sampling, speculation):
        monkeypatch.setattr(module, "draw_from", paths.draw_from)
    found, accepted = Counter(), 0
    for result, probability in paths.all(
        lambda: generate(decoder, [[1, 2]], config, draft=draft)[0]
    ):
        found[result.tokens] += probability
        accepted += result.accepted
    expected = distribution_of(decoder, [1, 2], config)
    assert found.keys() == expected.keys()
    assert max(abs(found[text] - p) for text, p in expected.items()) < 1e-12
    assert accepted > 0


@pytest.mark.parametrize("n", [1, 3])
def test_many_drawn_texts_are_distributed_as_the_target_s(make_decoder, n):
    """Pearson's chi-square test with real random numbers, in one ragged batch."""
    decoder, draft = make_decoder(vocab_size=4), make_decoder(vocab_size=4, seed=3)
    with torch.no_grad():
        for weights in (decoder.head.proj.weight, draft.head.proj.weight):
            weights.mul_(0.4)
    config = GenerationConfig(
        max_new_tokens=4, seed=1, n_samples=6000, speculate=n, frequency_penalty=0.5
    )
    results = generate(decoder, [[1, 2]], config, draft=draft, batch_size=6000)
    counts = Counter(result.tokens for result in results)
    expected = distribution_of(decoder, [1, 2], config)
    square, rare, seen_rare, cells = 0.0, 0.0, 0, 0
    for text, p in expected.items():
        if p * len(results) < 5:  # too few for a separate cell
            rare, seen_rare = rare + p * len(results), seen_rare + counts[text]
            continue
        square += (counts[text] - p * len(results)) ** 2 / (p * len(results))
        cells += 1
    square += (seen_rare - rare) ** 2 / rare if rare else 0.0
    # Wilson and Hilferty: the cube root is nearly normal. Above 3.3 has probability 1 in 2,000.
    freedom = cells - (0 if rare else 1)
    z = ((square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(z) < 3.3
    assert 0.2 < sum(r.accepted for r in results) / sum(r.proposed for r in results) < 0.95
