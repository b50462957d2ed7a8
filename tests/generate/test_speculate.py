"""Speculative decoding gives the same completions as plain decoding, or the same distribution."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch

from workhorse.errors import WorkhorseError
from workhorse.generate import Engine, GenerationConfig, generate, stream
from workhorse.generate import engine as scheduler_module
from workhorse.generate.request import Guess

# Repetitive enough for lookup, and of different lengths.
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [6], [7, 8, 9, 7, 8], [10, 11, 12, 13, 10, 11, 12]]
ARCHITECTURES = {
    "rope": {},
    "alibi": {"n_kv_heads": 1, "position": {"kind": "alibi"}},
    "window": {"window": 4},
    "chunk": {"chunk": 4},
    "softcap": {"softcap": 5.0, "sinks": True, "position": {"kind": "none"}},
    "latent": {
        "kind": "latent_attention",
        "kv_rank": 6,
        "nope_dim": 4,
        "rope_dim": 4,
        "value_dim": 4,
    },
    "latent window": {
        "kind": "latent_attention",
        "kv_rank": 6,
        "nope_dim": 4,
        "rope_dim": 4,
        "value_dim": 4,
        "window": 3,
    },
    "dynamic ntk": {
        "position": {
            "kind": "rope",
            "scaling": {"kind": "dynamic_ntk", "factor": 4.0, "original_max_seq_len": 11},
        }
    },
}
OPTIONS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.6, "top_p": 0.95, "seed": 5},
    "penalties": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.3,
        "top_k": 4,
        "seed": 6,
        "stop_tokens": (0, 5),
    },
    "bias": {"min_p": 0.02, "presence_penalty": 0.5, "logit_bias": {3: 2.0}, "seed": 7},
    "past the context": {"temperature": 0.5, "seed": 8, "truncate": "left", "max_new_tokens": 34},
}
every_architecture = pytest.mark.parametrize(
    "attention", ARCHITECTURES.values(), ids=ARCHITECTURES.keys()
)
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def config_of(options, **more) -> GenerationConfig:
    defaults = {"max_new_tokens": 14, "stop_tokens": (), "logprobs": 2}
    return GenerationConfig(**{**defaults, **options, **more})


def unspeculated(results):
    return [replace(result, proposed=None, accepted=None) for result in results]


def assert_same(results, expected):
    """Assert equal completions, except for the last bits of log-probabilities."""
    for result, plain in zip(unspeculated(results), expected, strict=True):
        assert replace(result, logprobs=None) == replace(plain, logprobs=None)
        for mine, theirs in zip(result.logprobs or (), plain.logprobs or (), strict=True):
            assert mine.token == theirs.token
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


class Oracle:
    """Guesses the completions of plain decoding, with errors at the positions of a pattern."""

    texts: dict[tuple[int, ...], list[int]]
    errors: tuple[bool, ...]

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, rows, most, how):
        guesses = []
        for row, n in zip(rows, most, strict=True):
            text = next(t for p, t in self.texts.items() if t[: len(row.tokens)] == row.tokens)
            coming = text[len(row.tokens) :][:n]
            wrong = [self.errors[(self.calls + i) % len(self.errors)] for i in range(len(coming))]
            guesses.append(
                Guess(tuple((t + 1) % 17 if w else t for t, w in zip(coming, wrong, strict=True)))
            )
        self.calls += 1
        return guesses

    def leave(self, row) -> None:
        pass


@pytest.fixture
def with_oracle(monkeypatch):
    def use(prompts, plain, errors) -> None:
        texts = {
            tuple(p): list(p) + list(r.tokens) + [1] * 9
            for p, r in zip(prompts, plain, strict=True)
        }
        oracle = type("Knowing", (Oracle,), {"texts": texts, "errors": errors})
        monkeypatch.setattr(scheduler_module, "PromptLookup", oracle)

    return use


@every_architecture
@every_option
def test_lookup_gives_the_text_of_plain_decoding(make_decoder, attention, options):
    decoder = make_decoder(max_seq_len=24, **attention)
    config = config_of(options)
    plain = generate(decoder, PROMPTS, config)
    guessed = generate(decoder, PROMPTS, config.replace(speculate=3))
    assert_same(guessed, plain)


@every_architecture
@every_option
@pytest.mark.parametrize("errors", [(False,), (True, False, False)])
def test_any_pattern_of_right_and_wrong_guesses(
    make_decoder, with_oracle, attention, options, errors
):
    decoder = make_decoder(max_seq_len=24, **attention)
    config = config_of(options)
    plain = generate(decoder, PROMPTS, config)
    with_oracle(PROMPTS, plain, errors)
    guessed = generate(decoder, PROMPTS, config.replace(speculate=5))
    assert_same(guessed, plain)
    assert sum(result.accepted for result in guessed) > 0
    if errors == (False,):
        whole = [result for result in guessed if result.finish_reason != "eos"]
        assert all(result.accepted == result.proposed for result in whole)


@every_architecture
@pytest.mark.parametrize("options", [OPTIONS["greedy"], {"temperature": 0, "truncate": "left"}])
def test_a_draft_gives_the_greedy_text(make_decoder, attention, options):
    decoder = make_decoder(max_seq_len=24, **attention)
    draft = copy.deepcopy(decoder)
    with torch.no_grad():  # close to the model, so that some guesses are accepted
        for weight in draft.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    config = config_of(options, max_new_tokens=40, presence_penalty=0.3)
    request = config.replace(speculate=4)
    guessed = generate(decoder, PROMPTS, request, draft=draft)
    assert_same(guessed, generate(decoder, PROMPTS, config))
    proposed, accepted = (
        sum(getattr(r, name) for r in guessed) for name in ("proposed", "accepted")
    )
    assert 0 < accepted < proposed


def test_learned_positions(make_decoder):
    config = make_decoder(position={"kind": "none"}).config
    config = config.replace(embedding={"position": {"kind": "learned"}, "dropout": 0.0})
    decoder = config.build(dtype=torch.float64).eval()
    request = config_of({"temperature": 0}, max_new_tokens=60)
    plain = generate(decoder, PROMPTS, request)
    assert {r.finish_reason for r in plain} == {"length"}
    for draft in (None, decoder):
        assert_same(generate(decoder, PROMPTS, request.replace(speculate=5), draft=draft), plain)


def test_float32_greedy_tokens_are_the_same(make_decoder):
    decoder = make_decoder(max_seq_len=64).float()
    config = GenerationConfig(temperature=0, max_new_tokens=40)
    plain = generate(decoder, PROMPTS, config)
    for draft in (None, make_decoder(max_seq_len=64, seed=1).float()):
        guessed = generate(decoder, PROMPTS, config.replace(speculate=4), draft=draft)
        assert [r.tokens for r in guessed] == [r.tokens for r in plain]


@pytest.fixture
def consumed(monkeypatch):
    """Records the shapes of the inputs of a decoder."""

    def watch(decoder):
        shapes, hidden = [], decoder.hidden

        def spy(tokens, **arguments):
            shapes.append(tuple(tokens.shape))
            return hidden(tokens, **arguments)

        monkeypatch.setattr(decoder, "hidden", spy)
        return shapes

    return watch


def test_a_text_that_repeats_itself_is_looked_up(make_decoder, consumed):
    decoder = make_decoder()
    shapes = consumed(decoder)
    config = GenerationConfig(
        temperature=0, logit_bias={3: 99.0}, max_new_tokens=12, speculate=4, n_samples=1
    )
    result = generate(decoder, [[1, 2]], config)[0]
    assert result.tokens == (3,) * 12
    # The first 3s have no earlier match; later ones match 3 3, which 3 followed.
    assert shapes == [(1, 2), (1, 1), (1, 1), (1, 5), (1, 4)]
    assert (result.proposed, result.accepted) == (7, 7)


def test_a_perfect_draft_saves_passes(make_decoder, consumed):
    decoder, draft = make_decoder(), make_decoder()
    shapes, of_draft = consumed(decoder), consumed(draft)
    config = GenerationConfig(temperature=0, max_new_tokens=10, speculate=3)
    result = generate(decoder, [[1, 2]], config, draft=draft)[0]
    # A pass gives its guesses and one more token; the last pass has one guess less than allowed.
    assert shapes == [(1, 2), (1, 4), (1, 4), (1, 1)]
    assert (result.proposed, result.accepted) == (6, 6)
    # The draft processes its own last guess and the token after it in the next turn.
    assert of_draft == [(1, 3), (1, 1), (1, 1), (1, 2), (1, 1), (1, 1)]


def test_a_sampling_draft_equal_to_the_model_is_always_right(make_decoder):
    decoder = make_decoder()
    config = GenerationConfig(seed=4, max_new_tokens=15, speculate=4, repetition_penalty=1.2)
    for result in generate(decoder, PROMPTS, config, draft=decoder):
        assert result.proposed == result.accepted > 0


def test_a_seed_gives_the_same_text_whatever_the_batch_holds(make_decoder):
    decoder, draft = make_decoder(), make_decoder(seed=1, max_seq_len=10)
    config = config_of({"seed": 3, "truncate": "left"}, speculate=4, max_new_tokens=60)
    together = generate(decoder, PROMPTS, config, draft=draft)
    alone = [generate(decoder, [prompt], config, draft=draft)[0] for prompt in PROMPTS]
    in_twos = generate(decoder, PROMPTS[::-1], config, draft=draft, batch_size=2)[::-1]
    for results in (alone, in_twos):
        assert_same(results, unspeculated(together))
        counts = [(r.proposed, r.accepted) for r in together]
        assert [(r.proposed, r.accepted) for r in results] == counts
    assert any(0 < r.accepted < r.proposed for r in together)
    other = generate(decoder, PROMPTS, config.replace(seed=4), draft=draft)
    assert [r.tokens for r in other] != [r.tokens for r in together]


def test_samples_of_a_prompt_are_those_of_the_seeds_that_follow(make_decoder):
    decoder, draft = make_decoder(), make_decoder(seed=1)
    config = GenerationConfig(seed=3, max_new_tokens=10, n_samples=3, speculate=2)
    results = generate(decoder, PROMPTS[:2], config, draft=draft)
    singles = [
        generate(decoder, [p], config.replace(seed=3 + j, n_samples=1), draft=draft)[0]
        for p, j in itertools.product(PROMPTS[:2], range(3))
    ]
    assert results == singles


# ---- The end of a completion.


def test_a_text_may_end_inside_a_guess(make_decoder, letters, with_oracle):
    """Completions end by a stop string across accepted tokens, by eos, or by the limit."""
    decoder = make_decoder(seed=2)
    config = GenerationConfig(seed=1, max_new_tokens=20)
    free = generate(decoder, [[1, 2]], config, tokenizer=letters())[0]
    for change, eos in (
        ({"stop": (free.text[5:8],)}, None),
        ({}, free.tokens[6]),
        ({"max_new_tokens": 7}, None),
    ):
        request, tokenizer = config.replace(**change), letters(eos_id=eos)
        plain = list(stream(decoder, [[1, 2]], request, tokenizer=tokenizer))
        with_oracle([[1, 2]], [free], (False,))
        deltas = list(stream(decoder, [[1, 2]], request.replace(speculate=4), tokenizer=tokenizer))
        assert [replace(d, proposed=0, accepted=False) for d in deltas] == plain
        assert deltas[-1].accepted or change.get("max_new_tokens")
        # The first token follows from the prompt; each pass reports its guesses once.
        last = 0 if "max_new_tokens" in change else 4
        assert [d.proposed for d in deltas] == [0, 4, 0, 0, 0, 0, last, 0, 0, 0, 0][: len(deltas)]


def test_a_draft_of_a_shorter_context_goes_on_guessing(make_decoder, consumed):
    decoder, draft = make_decoder(max_seq_len=64), make_decoder(max_seq_len=8)
    config = GenerationConfig(temperature=0, max_new_tokens=50, speculate=6)
    shapes = consumed(draft)
    plain = generate(decoder, PROMPTS, config.replace(speculate=0))
    assert_same(generate(decoder, PROMPTS, config, draft=draft), plain)
    assert max(columns for _, columns in shapes) <= 8 * len(PROMPTS)
    assert len(shapes) > 50
    # No more than it can remove again after it has dropped half of its context.
    assert max(delta.proposed for delta in stream(decoder, PROMPTS, config, draft=draft)) == 4


# ---- Requests.


def test_a_draft_padded_to_another_size(make_decoder, letters):
    decoder, draft = make_decoder(vocab_size=20), make_decoder(vocab_size=24, seed=1)
    narrow = make_decoder(vocab_size=18, seed=1)
    config = GenerationConfig(seed=1, max_new_tokens=12, speculate=3, temperature=2.0)
    for guesser in (draft, narrow):
        results = generate(decoder, PROMPTS, config, tokenizer=letters(17), draft=guesser)
        assert max(token for r in results for token in r.tokens) < 17


@pytest.mark.parametrize(
    ("vocab_size", "options", "message"),
    [
        (
            16,
            {"speculate": 2},
            "the draft has a vocabulary of 16 and the model one of 17; choose a",
        ),
        (
            18,
            {"speculate": 2},
            "the draft has a vocabulary of 18 and the model one of 17; choose a",
        ),
        (17, {}, "a draft has no effect with speculate=0; set speculate=4"),
        (17, {"beams": 2}, "a draft has no effect with speculate=0; set speculate=4"),
    ],
)
def test_wrong_drafts(make_decoder, vocab_size, options, message):
    draft = make_decoder(vocab_size=vocab_size)
    for call in (generate, stream):
        with pytest.raises(WorkhorseError, match=f"^{message}|returns its text only at the end"):
            call(make_decoder(), [[1]], GenerationConfig(**options), draft=draft)


def test_a_damaged_draft_is_reported(make_decoder):
    draft = make_decoder()
    with torch.no_grad():
        draft.head.proj.weight[3] = torch.nan
    config = GenerationConfig(speculate=2)
    with pytest.raises(WorkhorseError, match=r"the draft's logits are not finite \(nan or inf\)"):
        generate(make_decoder(), [[1]], config, draft=draft)


def test_nothing_is_told_of_guesses_where_none_were_asked_for(make_decoder):
    result = generate(make_decoder(), [[1]], GenerationConfig(max_new_tokens=2))[0]
    assert (result.proposed, result.accepted) == (None, None)


def answer(engine, prompt, config):
    """The new tokens of one request."""
    engine.add(prompt, config)
    tokens = []
    while not engine.is_idle:
        tokens += [delta.token for delta in engine.step()]
    return tokens


@pytest.mark.usefixtures("small_blocks")
def test_a_conversation_s_draft_reads_only_what_is_new(make_decoder, consumed):
    decoder, draft = make_decoder(max_seq_len=64), make_decoder(max_seq_len=64, seed=1)
    config = GenerationConfig(temperature=0, max_new_tokens=8, speculate=3)
    engine = Engine(decoder, draft=draft, max_sequences=1, speculate=3, prefix_caching=True)
    first = answer(engine, [1, 2, 3], config)
    prompt = [1, 2, 3, *first, 9, 8, 7]
    expected = generate(decoder, [prompt], config.replace(speculate=0))[0]
    shapes, of_draft = consumed(decoder), consumed(draft)
    assert answer(engine, prompt, config) == list(expected.tokens)
    assert shapes[0][1] <= 4 + 1 + 3  # with the rest of a block of four tokens
    assert of_draft[0][1] <= 4 + 1 + 3 + 3


def test_a_prompt_whose_last_token_is_processed_alone_has_no_guess(make_decoder):
    """Its other samples need the logits after the prompt, and their own tokens."""
    decoder = make_decoder(max_seq_len=64)
    prompt = [1, 2, 3] * 3
    config = GenerationConfig(temperature=0.5, n_samples=2, max_new_tokens=8, seed=1, speculate=3)
    engine = Engine(decoder, max_sequences=2, token_budget=len(prompt) - 1, speculate=3)
    engine.add(prompt, config)
    tokens = {0: [], 1: []}
    while not engine.is_idle:
        for delta in engine.step():
            tokens[delta.index].append(delta.token)
    plain = generate(decoder, [prompt], config.replace(speculate=0))
    assert [tokens[0], tokens[1]] == [list(one.tokens) for one in plain]


def test_more_guesses_may_be_asked_for_than_tokens(make_decoder):
    decoder = make_decoder(max_seq_len=200)
    config = GenerationConfig(temperature=0, max_new_tokens=5)
    assert_same(
        generate(decoder, [[1] * 10], config.replace(speculate=150)),
        generate(decoder, [[1] * 10], config),
    )


def test_a_draft_that_would_guess_nothing_is_refused(make_decoder):
    decoder, draft = make_decoder(), make_decoder(seed=1)
    with pytest.raises(WorkhorseError, match="a draft has no effect with speculate=0"):
        Engine(decoder, draft=draft)
    with pytest.raises(WorkhorseError, match="the draft has a vocabulary of 5 and the model one"):
        Engine(decoder, draft=make_decoder(vocab_size=5), speculate=2)
