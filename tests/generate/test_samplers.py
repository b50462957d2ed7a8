"""Samplers compared with Hugging Face's, and draws compared with their distribution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.generate.choosing import sampler
from tests.native.machine import DECODING
from workhorse.generate import GenerationConfig, sampling


@pytest.fixture(scope="module")
def reference():
    return pytest.importorskip("transformers.generation.logits_process")


def random_logits(seed: int, batch: int = 5, vocab: int = 50) -> torch.Tensor:
    return 3 * torch.randn(batch, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [1, 7, 50, 80])
def test_top_k(reference, k):
    logits = random_logits(k)
    expected = reference.TopKLogitsWarper(top_k=k)(None, logits)
    assert torch.equal(sampling.top_k(logits, k), expected)


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("vocab", [50, 3000])
def test_top_p(reference, p, vocab):
    # In float64: the reference sums from the other end, and in float32 the roundings differ.
    logits = random_logits(1, vocab=vocab).double()
    expected = reference.TopPLogitsWarper(top_p=p)(None, logits)
    assert torch.equal(sampling.top_p(logits, p), expected)


def test_top_p_looks_beyond_the_likeliest_tokens_when_the_nucleus_is_large(reference):
    logits = random_logits(2, vocab=3000) / 30  # nearly flat: the nucleus holds most tokens
    kept = sampling.top_p(logits, 0.9).isfinite()
    assert torch.equal(kept, reference.TopPLogitsWarper(top_p=0.9)(None, logits).isfinite())
    assert kept.sum(dim=-1).min() > 2000


@given(seed=st.integers(0, 1000), p=st.floats(0.001, 1.0), scale=st.floats(0.1, 5))
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed, p, scale):
    probabilities = (random_logits(seed, batch=1) * scale).double().softmax(-1)[0]
    kept = sampling.top_p(probabilities.log()[None], p)[0].isfinite()
    assert probabilities[kept].sum() >= p - 1e-9
    without_its_least = probabilities[kept].sum() - probabilities[kept].min()
    assert without_its_least <= p + 1e-9
    assert not kept.all() or p > without_its_least - 1e-9
    if not kept.all():
        assert probabilities[kept].min() >= probabilities[~kept].max()


def test_filters_keep_or_drop_ties_together():
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert sampling.top_k(logits, 2).isfinite().tolist() == [[True, True, True, False]]
    assert sampling.top_p(logits, 0.1).isfinite().tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("p", [0.01, 0.3, 1.0])
def test_min_p(reference, p):
    logits = random_logits(3)
    assert torch.equal(sampling.min_p(logits, p), reference.MinPLogitsWarper(min_p=p)(None, logits))


def history(prompts, new) -> sampling.History:
    result = sampling.History.of(prompts, 50, torch.device("cpu"))
    for tokens in zip(*new, strict=True):
        result.add(torch.tensor(tokens))
    return result


def test_repetition_penalty(reference):
    logits = random_logits(4, batch=2)
    prompts, new = [[1, 2, 3], [4]], [[3, 9, 9], [8, 8, 7]]
    for row in range(2):
        ids = torch.tensor([prompts[row] + new[row]])
        expected = reference.RepetitionPenaltyLogitsProcessor(1.3)(ids, logits[row : row + 1])
        got = sampling.repetition_penalty(logits, history(prompts, new).seen, 1.3)
        assert_close(got[row : row + 1], expected, rtol=0, atol=0)


def test_presence_and_frequency_count_the_new_text_only():
    logits = torch.zeros(2, 50)
    past = history([[1, 2, 3], [4]], [[3, 9, 9], [8, 8, 8]])
    got = sampling.presence_and_frequency_penalty(logits, past.counts, 0.5, 0.1)
    expected = torch.zeros(2, 50)
    expected[0, 3], expected[0, 9], expected[1, 8] = -0.6, -0.7, -0.8
    assert_close(got, expected)


def test_history_follows_its_rows():
    past = history([[1], [2]], [[5, 5], [6, 7]]).copy([1])
    past.add(torch.tensor([7]))
    assert past.counts.nonzero().tolist() == [[0, 6], [0, 7]]
    assert past.counts[0, 7] == 2
    assert past.seen.nonzero().tolist() == [[0, 2], [0, 6], [0, 7]]


def test_logit_bias_adds():
    got = sampling.logit_bias(torch.ones(2, 4), {1: -100.0, 3: 2.5})
    assert got.tolist() == [[1.0, -99.0, 1.0, 3.5]] * 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 2.0},
        {"top_k": 4},
        {"top_p": 0.7, "temperature": 0.5},
        {"min_p": 0.1, "logit_bias": {0: 1.0}},
    ],
)
def test_draws_follow_the_distribution(options):
    """Over an even grid of uniforms, each token is drawn in proportion to its probability."""
    config, vocab, grid = GenerationConfig(**options), 12, 20_000
    logits = random_logits(6, batch=1, vocab=vocab)
    uniforms = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    drawn = sampler(config)(logits.expand(grid, -1), uniforms, None)
    expected = logits.clone()
    for token, bias in config.logit_bias.items():
        expected[:, token] += bias
    expected /= config.temperature
    for name in ("top_k", "top_p", "min_p"):
        if name in options:
            expected = getattr(sampling, name)(expected, options[name])
    frequencies = drawn.bincount(minlength=vocab) / grid
    assert_close(frequencies, expected.softmax(-1)[0], atol=2 / grid, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_removed_token_is_never_drawn(uniform):
    logits = torch.full((1, 9), -torch.inf)
    logits[0, 4] = 0.3
    assert sampling.draw(logits, torch.tensor([uniform], dtype=torch.float64)).tolist() == [4]


def test_the_largest_uniform_stays_within_the_distribution():
    """The largest uniform draws a valid token, even if rounded probabilities do not sum to 1."""
    logits = random_logits(9, batch=500, vocab=40)
    logits[:, 30:] = -torch.inf
    largest = torch.full((500,), 1 - 2**-53, dtype=torch.float64)
    assert sampling.draw(logits, largest).max() < 30


def test_a_row_does_not_depend_on_its_neighbours():
    """A row's draw stays the same if another row makes top-p sort the whole vocabulary."""
    config = GenerationConfig(temperature=0.9, top_k=2500, top_p=0.9, min_p=1e-4)
    logits = random_logits(7, batch=4, vocab=3000)
    logits[2] /= 50
    uniforms = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sample = sampler(config)
    together = sample(logits, uniforms, None).tolist()
    alone = [sample(logits[r : r + 1], uniforms[r : r + 1], None).item() for r in range(4)]
    assert together == alone


def test_the_whole_chain_in_the_order_of_transformers(reference):
    config = GenerationConfig(
        repetition_penalty=1.4, temperature=0.6, top_k=20, top_p=0.9, min_p=0.01
    )
    logits = random_logits(8, batch=1)
    past = history([[1, 2]], [[3]])
    expected = reference.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([[1, 2, 3]]), logits)
    for warper in (
        reference.TemperatureLogitsWarper(0.6),
        reference.TopKLogitsWarper(20),
        reference.TopPLogitsWarper(0.9),
        reference.MinPLogitsWarper(0.01),
    ):
        expected = warper(None, expected)
    grid = 5000
    uniforms = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    past.prompt, past.counts = past.prompt.expand(grid, -1), past.counts.expand(grid, -1)
    drawn = sampler(config)(logits.expand(grid, -1), uniforms, past)
    frequencies = drawn.bincount(minlength=50) / grid
    assert_close(frequencies, expected.softmax(-1)[0], atol=2 / grid, rtol=0)


def test_ids_no_text_stands_for_are_never_chosen():
    logits = torch.zeros(1, 6)
    logits[0, 5] = 50.0
    for config in (GenerationConfig(temperature=0), GenerationConfig()):
        token = sampler(config, vocab=5)(logits, torch.tensor([0.999], dtype=torch.float64), None)
        assert token.item() < 5


@pytest.mark.parametrize("natively", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_argmax_is_greedy_where_all_is_finite(dtype, natively):
    logits = random_logits(3, vocab=200).to(dtype)
    logits[1, 7] = torch.nan
    logits[4, 199] = -torch.inf
    found = sampling.argmax(logits, DECODING if natively else None)
    assert found[[1, 4]].tolist() == [-1, -1]
    assert torch.equal(found[[0, 2, 3]], logits[[0, 2, 3]].argmax(dim=-1))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 0, "logit_bias": {3: 1.0}}, False),
        ({"temperature": 0, "repetition_penalty": 1.2}, False),
        ({"temperature": 0, "frequency_penalty": 0.1}, False),
    ],
)
def test_the_likeliest_is_taken_only_of_logits_that_nothing_changes(settings, expected):
    assert sampling.takes_likeliest(GenerationConfig(**settings)) == expected
