"""The decoding loop compared with a naive one that runs the whole sequence in each step."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from tests.generate.choosing import sampler
from workhorse.errors import WorkhorseError
from workhorse.generate import GenerationConfig, generate, sampling, stream
from workhorse.generate.runner import on_sampling_device

PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9], [10, 11, 12, 13, 14, 15, 16]]


@torch.no_grad()
def naive(decoder, prompt, config, seed=0, vocab=None) -> list[int]:
    """Without cache or batch: one forward pass over the whole sequence per new token."""
    sample = sampler(config, vocab)
    generator = torch.Generator().manual_seed(seed)
    seen, new = list(prompt), []
    past = sampling.History.of([prompt], decoder.config.vocab_size, torch.device("cpu"))
    stops = config.stop_tokens or ()
    while len(new) < config.max_new_tokens and not (new and new[-1] in stops):
        if len(seen) > decoder.max_seq_len:
            if config.truncate == "refuse":
                break
            # The context is full: its older half is dropped.
            seen = seen[-(decoder.max_seq_len if not new else decoder.max_seq_len // 2) :]
        logits = decoder(torch.tensor([seen]))[:, -1]
        uniform = torch.rand((), dtype=torch.float64, generator=generator)
        token = sample(logits, uniform[None], past)
        past.add(token)
        new.append(token.item())
        seen.append(token.item())
    return new


@pytest.mark.parametrize(
    "attention",
    [
        {},
        {"n_kv_heads": 1, "position": {"kind": "alibi"}},
        {"window": 4},
        {"position": {"kind": "none"}, "qkv_bias": True},
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.95, "seed": 5},
        {"top_k": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "seed": 6},
        {"min_p": 0.02, "presence_penalty": 0.5, "logit_bias": {3: 2.0}, "seed": 7},
        {"seed": 8, "truncate": "left", "max_new_tokens": 40, "stop_tokens": ()},
        {"seed": 8, "truncate": "left", "max_new_tokens": 60, "stop_tokens": (2,)},
    ],
)
def test_a_ragged_cached_batch_gives_what_the_naive_loop_gives(make_decoder, attention, options):
    decoder = make_decoder(max_seq_len=16, **attention)
    # Two ids end a completion, so sequences leave the batch at different times.
    config = GenerationConfig(**{"max_new_tokens": 12, "stop_tokens": (0, 1), **options})
    results = generate(decoder, PROMPTS, config)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert list(result.tokens) == naive(decoder, prompt, config, seed=config.seed or 0)


def test_the_same_seed_gives_the_same_text_whatever_else_runs(make_decoder):
    decoder = make_decoder()
    config = GenerationConfig(seed=3, max_new_tokens=10, stop_tokens=(0,))
    together = generate(decoder, PROMPTS, config)
    torch.rand(7)  # other code draws from the global generator
    in_twos = generate(decoder, PROMPTS[::-1], config, batch_size=2)[::-1]
    alone = [generate(decoder, [prompt], config)[0] for prompt in PROMPTS]
    assert together == in_twos == alone
    other = generate(decoder, PROMPTS, config.replace(seed=4))
    assert [r.tokens for r in other] != [r.tokens for r in together]


def test_generation_leaves_the_global_generator_alone(make_decoder):
    decoder = make_decoder()
    before = torch.get_rng_state()
    generate(decoder, PROMPTS, GenerationConfig(max_new_tokens=3))
    assert torch.equal(before, torch.get_rng_state())


def test_a_seed_that_was_not_chosen_is_told(make_decoder):
    decoder = make_decoder()
    first = generate(decoder, PROMPTS[:1], GenerationConfig(max_new_tokens=15))[0]
    again = generate(decoder, PROMPTS[:1], GenerationConfig(max_new_tokens=15, seed=first.seed))[0]
    assert again == first
    assert generate(decoder, PROMPTS[:1], GenerationConfig(temperature=0))[0].seed is None


def test_samples_of_a_prompt_are_those_of_the_seeds_that_follow(make_decoder):
    decoder = make_decoder()
    config = GenerationConfig(seed=3, max_new_tokens=10, n_samples=3)
    results = generate(decoder, PROMPTS[:2], config, batch_size=4)
    singles = [
        generate(decoder, [prompt], config.replace(seed=3 + sample, n_samples=1))[0]
        for prompt in PROMPTS[:2]
        for sample in range(3)
    ]
    assert results == singles


def test_eos_ends_a_text_and_is_not_part_of_it(make_decoder, letters):
    decoder = make_decoder(seed=1)
    free = generate(decoder, [[1, 2]], GenerationConfig(seed=1, max_new_tokens=20))[0]
    eos = free.tokens[4]
    length = free.tokens.index(eos) + 1
    config = GenerationConfig(seed=1, max_new_tokens=20)
    ended = generate(decoder, [[1, 2]], config, tokenizer=letters(eos_id=eos))[0]
    assert ended.finish_reason == "eos"
    assert ended.tokens == free.tokens[:length]
    assert ended.text == "".join(chr(97 + token) for token in free.tokens[: length - 1])
    unstopped = config.replace(stop_tokens=())
    goes_on = generate(decoder, [[1, 2]], unstopped, tokenizer=letters(eos_id=eos))[0]
    assert goes_on.tokens == free.tokens
    assert goes_on.finish_reason == "length"


def test_a_stop_text_across_tokens_ends_the_text_before_it(make_decoder, letters):
    decoder, tokenizer = make_decoder(seed=2), letters()
    config = GenerationConfig(seed=1, max_new_tokens=20)
    free = generate(decoder, [[1, 2]], config, tokenizer=tokenizer)[0].text
    stop = free[5:8]
    before = free[: free.index(stop)]
    config = config.replace(stop=(stop,))
    result = generate(decoder, [[1, 2]], config, tokenizer=tokenizer)[0]
    assert (result.text, result.finish_reason) == (before, "stop")
    assert len(result.tokens) == len(before) + 3  # includes the tokens of the stop string
    deltas = list(stream(decoder, [[1, 2]], config, tokenizer=tokenizer))
    assert "".join(delta.text for delta in deltas) == before
    shown = ""
    for delta in deltas:
        shown += delta.text
        assert before.startswith(shown), "a part of the stop string was shown"


def test_streaming_gives_the_same_results(make_decoder, letters):
    decoder, tokenizer = make_decoder(), letters(eos_id=4)
    config = GenerationConfig(seed=9, max_new_tokens=9, logprobs=2, n_samples=2)
    results = generate(decoder, PROMPTS, config, tokenizer=tokenizer, batch_size=4)
    deltas = list(stream(decoder, PROMPTS, config, tokenizer=tokenizer, batch_size=4))
    for index, result in enumerate(results):
        mine = [delta for delta in deltas if delta.index == index]
        assert tuple(delta.token for delta in mine) == result.tokens
        assert "".join(delta.text for delta in mine) == result.text
        assert tuple(delta.logprob for delta in mine) == result.logprobs
        assert [delta.finish_reason for delta in mine][-2:] == [None, result.finish_reason][
            -len(mine) :
        ]


def test_logprobs_are_those_of_the_model_before_any_shaping(make_decoder):
    decoder = make_decoder()
    config = GenerationConfig(
        seed=2, temperature=0.5, top_k=3, logit_bias={2: 3.0}, max_new_tokens=6, logprobs=4
    )
    result = generate(decoder, PROMPTS[:1], config)[0]
    text = torch.tensor([PROMPTS[0] + list(result.tokens)])
    with torch.no_grad():
        expected = decoder(text)[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1).float()
    for row, token, logprob in zip(expected, result.tokens, result.logprobs, strict=True):
        assert logprob.token == token
        assert logprob.logprob == pytest.approx(row[token].item(), abs=1e-5)
        best = row.topk(4)
        assert [token for token, _ in logprob.top] == best.indices.tolist()
        assert_close(
            torch.tensor([value for _, value in logprob.top]), best.values, atol=1e-5, rtol=0
        )
    assert generate(decoder, PROMPTS[:1], config.replace(logprobs=None))[0].logprobs is None


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "logit_bias": {2: 3.0}},
        {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": -0.8},
        {"temperature": 0, "repetition_penalty": 2.0, "frequency_penalty": -3.0},
        {"temperature": 0},
    ],
    ids=str,
)
def test_processed_logprobs_are_those_of_the_distribution_of_the_draw(
    make_decoder, letters, options
):
    """Compared with the formulas in float64. The last id is padding of the vocabulary."""
    decoder, prompt = make_decoder(), PROMPTS[0]
    vocab = decoder.config.vocab_size - 1
    config = GenerationConfig(
        seed=2, max_new_tokens=8, logprobs=vocab, processed_logprobs=True, stop_tokens=(), **options
    )
    result = generate(decoder, [prompt], config.replace(speculate=2), tokenizer=letters(vocab))[0]
    with torch.no_grad():
        rows = decoder(torch.tensor([prompt + list(result.tokens)]))[0, len(prompt) - 1 : -1]
    for n, (row, found) in enumerate(zip(rows.double().tolist(), result.logprobs, strict=True)):
        new = result.tokens[:n]
        z = {token: row[token] + config.logit_bias.get(token, 0) for token in range(vocab)}
        for token in {*prompt, *new}:
            z[token] *= config.repetition_penalty ** (-1 if z[token] > 0 else 1)
        for token in set(new):
            z[token] -= config.presence_penalty + config.frequency_penalty * new.count(token)
        p = {token: math.exp(value / (config.temperature or 1)) for token, value in z.items()}
        p = dict(sorted(p.items(), key=lambda one: -one[1])[: config.top_k])
        before = [0.0, *itertools.accumulate(p.values())][:-1]
        most = config.top_p * sum(p.values())
        p = {token: p[token] for token, mass in zip(p, before, strict=True) if mass < most}
        p = {token: one for token, one in p.items() if one >= config.min_p * max(p.values())}
        expected = {token: math.log(one / sum(p.values())) for token, one in p.items()}
        assert dict(found.top) == pytest.approx(expected, abs=1e-5)
        assert found.logprob == dict(found.top)[found.token]
    plain = generate(decoder, [prompt], config.replace(processed_logprobs=False))[0]
    if options == {"temperature": 0}:
        assert plain.tokens == result.tokens


def test_a_text_ends_with_its_context(make_decoder):
    """The last token is predicted from a full context, and is not processed itself."""
    decoder = make_decoder(max_seq_len=8)
    config = GenerationConfig(seed=0, max_new_tokens=50)
    results = generate(decoder, [[1] * 8, [1] * 3], config)
    assert [len(result.tokens) for result in results] == [1, 6]
    assert {result.finish_reason for result in results} == {"length"}


def test_a_prompt_longer_than_the_context(make_decoder):
    decoder = make_decoder(max_seq_len=8)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    with pytest.raises(WorkhorseError) as error:
        generate(decoder, [prompt], GenerationConfig())
    assert str(error.value) == (
        "the prompt has 9 tokens and the context is 8; shorten it, or set truncate to left, "
        "which keeps its end"
    )
    config = GenerationConfig(truncate="left", seed=1, max_new_tokens=1)
    cut = generate(decoder, [prompt], config)[0]
    assert cut.tokens == generate(decoder, [prompt[-8:]], config)[0].tokens
    assert cut.prompt_tokens == 9


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 17], {}, "token id 17 is not in the vocabulary of 17; use the model's own tokenizer"),
        ([-1], {}, "token id -1 is not in the vocabulary of 17"),
        (
            [1],
            {"logit_bias": {17: 1.0}},
            "token id 17 of logit_bias is not in .* 17; choose 0 to 16",
        ),
        ([1], {"stop_tokens": (99,)}, "token id 99 of stop_tokens is not in .* 17; choose 0 to 16"),
        ([1], {"stop": ("x",)}, "stop strings need a tokenizer"),
        ([1], {"beams": 3, "max_new_tokens": 30, "truncate": "left"}, "max_new_tokens=30 does not"),
    ],
)
def test_wrong_requests(make_decoder, prompt, options, message):
    with pytest.raises(WorkhorseError, match=f"^{message}"):
        generate(make_decoder(), [prompt], GenerationConfig(**options))


def test_ids_without_a_token_are_refused(make_decoder, letters):
    tokenizer = letters()
    tokenizer.vocab_size = 16
    for prompt, bias in (([16], {}), ([1], {16: 1.0})):
        with pytest.raises(WorkhorseError, match=r"^token id 16 .*is not in the vocabulary of 16"):
            generate(
                make_decoder(), [prompt], GenerationConfig(logit_bias=bias), tokenizer=tokenizer
            )


def test_a_tokenizer_larger_than_the_embedding_is_named(make_decoder, letters):
    tokenizer = letters()
    tokenizer.vocab_size = 18
    message = "token id 17 .* 17; the tokenizer has 18 tokens, more than the embedding: use"
    with pytest.raises(WorkhorseError, match=message):
        generate(make_decoder(), [[17]], GenerationConfig(stop_tokens=()), tokenizer=tokenizer)


def test_stream_refuses_when_called(make_decoder):
    with pytest.raises(WorkhorseError, match="the prompt is empty"):
        stream(make_decoder(), [[]], GenerationConfig())
    with pytest.raises(
        WorkhorseError,
        match=r"^beams=2 cannot be streamed: beam search returns its text only at the end",
    ):
        stream(make_decoder(), [[1]], GenerationConfig(beams=2))


def test_damaged_weights_are_reported(make_decoder):
    decoder = make_decoder()
    with torch.no_grad():
        decoder.head.proj.weight[3] = torch.nan
    with pytest.raises(WorkhorseError, match=r"logits are not finite \(nan or inf\)"):
        generate(decoder, [[1]], GenerationConfig(temperature=0))


def test_ids_beyond_the_tokenizer_are_never_chosen(make_decoder, letters):
    decoder = make_decoder()
    config = GenerationConfig(temperature=3.0, seed=1, max_new_tokens=20)
    result = generate(decoder, [[1]] * 4, config, tokenizer=letters(vocab_size=5))
    assert max(token for r in result for token in r.tokens) < 5
    expected = naive(decoder, [1], config, seed=1, vocab=5)
    assert list(result[0].tokens) == expected


def test_dropout_is_off_and_the_mode_is_restored(make_decoder):
    decoder = make_decoder(dropout=0.5)
    config = GenerationConfig(temperature=0, max_new_tokens=8)
    expected = generate(decoder, PROMPTS, config)
    decoder.train()
    assert generate(decoder, PROMPTS, config) == expected
    assert decoder.training
    abandoned = stream(decoder, PROMPTS, config)
    next(abandoned)
    abandoned.close()
    assert decoder.training


def test_training_goes_on_after_generation(make_decoder):
    decoder = make_decoder()
    generate(decoder, PROMPTS, GenerationConfig(max_new_tokens=2))
    decoder(torch.tensor(PROMPTS[:1])).sum().backward()
    assert decoder.head.proj.weight.grad is not None


def test_finished_rows_leave_the_batch(make_decoder, consumed):
    decoder = make_decoder(max_seq_len=8)
    shapes = consumed(decoder)
    generate(decoder, [[1] * 8, [1] * 6, [1] * 7], GenerationConfig(max_new_tokens=20))
    # Completions end with the context: after 1, 3 and 2 tokens.
    assert shapes == [(1, 8 + 6 + 7), (2, 1), (1, 1)]  # prompts are packed


def test_samples_share_the_reading_of_their_prompt(make_decoder, consumed):
    decoder = make_decoder()
    shapes = consumed(decoder)
    generate(decoder, [[1, 2, 3]], GenerationConfig(n_samples=4, max_new_tokens=2))
    assert shapes == [(1, 3), (4, 1)]


def test_the_text_goes_on_from_its_prompt(make_decoder, letters):
    """The space before the first word is kept, and a character begun in the prompt is completed."""
    tokenizer = letters()
    generate(make_decoder(), [[3, 1]], GenerationConfig(max_new_tokens=1), tokenizer=tokenizer)
    assert tokenizer.after == (3, 1)
    beams = GenerationConfig(beams=2, max_new_tokens=1)
    generate(make_decoder(), [[5, 1]], beams, tokenizer=tokenizer)
    assert tokenizer.after == (5, 1)


def test_tokens_are_chosen_on_the_cpu_where_the_device_has_no_float64():
    class OnMps(torch.Tensor):
        device = torch.device("mps")

        def cpu(self):
            return self.as_subclass(torch.Tensor)

    logits = torch.rand(2, 3)
    assert on_sampling_device(logits) is logits
    moved = on_sampling_device(logits.as_subclass(OnMps))
    assert moved.device.type == "cpu"
    assert torch.equal(moved, logits)


def test_a_completion_without_a_tokenizer_prints_its_tokens(make_decoder):
    decoder = make_decoder()
    for config in (GenerationConfig(seed=1, max_new_tokens=3), GenerationConfig(beams=2)):
        (completion,) = generate(decoder, [[1, 2, 3]], config)
        assert str(completion) == str(list(completion.tokens))


BY_LENGTH = {
    "dynamic_ntk": {"factor": 4.0},
    "longrope": {"factor": 4.0, "short_factor": [1, 1.1, 1.2, 1.3], "long_factor": [4, 5, 6, 7]},
}


@pytest.mark.parametrize("kind", BY_LENGTH)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("truncate", ["refuse", "left"])
def test_angles_that_depend_on_the_length_depend_on_the_row_s_own(
    make_decoder, kind, window, speculate, truncate
):
    """A short sequence is batched with a long one, and with one that drops half its context."""
    scaling = {"kind": kind, "original_max_seq_len": 12, **BY_LENGTH[kind]}
    position = {"kind": "rope", "theta": 100.0, "scaling": scaling}
    decoder = make_decoder(max_seq_len=30, position=position, window=window)
    prompts = [[1, 2, 3], [*range(17), *range(9)], [4, 5] * 7]
    options = {"temperature": 0, "stop_tokens": (), "max_new_tokens": 18, "logprobs": 1}
    config = GenerationConfig(**options, speculate=speculate, truncate=truncate)
    for result, prompt in zip(generate(decoder, prompts, config), prompts, strict=True):
        alone = generate(decoder, [prompt], config.replace(speculate=0))[0]
        assert result.tokens == alone.tokens
        expected = [one.logprob for one in alone.logprobs]
        assert [one.logprob for one in result.logprobs] == pytest.approx(expected, abs=1e-9)
