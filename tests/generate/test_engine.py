"""Continuous batching: each completion equals the completion of the request by itself."""

import random

import pytest
import torch

from tests.generate.serving import ATTENTION, alone, is_empty, run
from workhorse.devices.transfer import ToHost
from workhorse.generate import Engine, GenerationConfig, generate, stream
from workhorse.generate.runner import Runner
from workhorse.generate.sequence import TokenSequence

pytestmark = pytest.mark.usefixtures("small_blocks")


def random_request(pick: random.Random, seed: int) -> tuple[list[int], GenerationConfig]:
    """Prompts that often share a prefix, with every kind of sampling option."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9][: pick.randint(0, 9)]
    prompt += [pick.randrange(17) for _ in range(pick.randint(1, 8))]
    options = pick.choice(
        [
            {"temperature": 0},
            {"temperature": 0.7, "top_k": 5},
            {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
            {"n_samples": 2, "top_p": 0.9},
            {"temperature": 0, "speculate": 3},
            {"temperature": 0.9, "truncate": "left", "max_new_tokens": 30},
        ]
    )
    asked = {"max_new_tokens": pick.randint(1, 12), "stop_tokens": (0,), "seed": seed, **options}
    return prompt, GenerationConfig(**asked)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("room", [{"max_tokens": 160}, {"max_tokens": 40, "token_budget": 24}])
@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
def test_completions_do_not_depend_on_other_requests(make_decoder, attention, room, caching, ahead):
    decoder = make_decoder(max_seq_len=24, **attention)
    pick = random.Random(7)
    engine = Engine(
        decoder,
        max_sequences=6,
        speculate=3,
        prefix_caching=caching,
        **room,
    )
    engine.looks_ahead = ahead
    requests, cancelled = {}, set()
    texts: dict[int, list[int]] = {}
    for seed in range(20):
        prompt, config = random_request(pick, seed)
        for sample, result in enumerate(engine.add(prompt, config)):
            requests[result] = prompt, config, sample
        for _ in range(pick.randint(0, 4)):
            for delta in engine.step():
                texts.setdefault(delta.index, []).append(delta.token)
        if pick.random() < 0.3:
            engine.cancel(gone := pick.choice(list(requests)))
            cancelled.add(gone)
    for result, tokens in run(engine).items():
        texts.setdefault(result, []).extend(tokens)
    for result, (prompt, config, sample) in requests.items():
        expected = alone(decoder, prompt, config)[sample]
        found = texts.get(result, [])
        assert found == expected[: len(found)]
        assert len(found) == len(expected) or result in cancelled


def test_a_token_is_read_before_the_host_knows_it(make_decoder, monkeypatch):
    """Each pass starts before the host has the previous token, except after the last token."""
    seen: list[str] = []
    plain_wait, plain_ahead = ToHost.wait, Runner.run_ahead
    monkeypatch.setattr(ToHost, "wait", lambda self: seen.append("known") or plain_wait(self))
    monkeypatch.setattr(
        Runner, "run_ahead", lambda *given: seen.append("read") or plain_ahead(*given)
    )
    decoder = make_decoder()
    engine = Engine(decoder, max_sequences=1)
    engine.looks_ahead = True
    config = GenerationConfig(temperature=0, max_new_tokens=4, stop_tokens=())
    engine.add([1, 2, 3], config)
    found = run(engine)
    assert seen == [*["read", "known"] * 3, "known"]
    assert list(found.values()) == alone(decoder, [1, 2, 3], config)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_processor_may_cancel_its_own_text(make_decoder, rows):
    """The request is dropped before its next token could be processed ahead."""
    decoder = make_decoder(max_seq_len=24)
    engine = Engine(decoder, max_sequences=rows)
    engine.looks_ahead = True
    config = GenerationConfig(temperature=0, max_new_tokens=12, stop_tokens=())

    def processor(logits, tokens):
        if len(tokens) == 8:
            engine.cancel(0)
        return logits

    engine.add([1, 2, 3], config, processors=[processor])
    for number in range(1, rows):
        engine.add([1, 2, number], config)
    texts = run(engine)
    assert is_empty(engine)
    for number in range(1, rows):
        assert [texts[number]] == alone(decoder, [1, 2, number], config)


def test_nothing_is_left_of_those_that_ended(make_decoder):
    engine = Engine(make_decoder(), max_sequences=3)
    for number in range(5):
        engine.add([1, 2, number], GenerationConfig(max_new_tokens=9, n_samples=2))
    engine.step()
    engine.cancel(0)
    engine.cancel(9)
    run(engine)
    assert is_empty(engine)


def test_a_prompt_that_begins_alike_is_read_from_where_it_differs(make_decoder, consumed):
    """Whole blocks are shared, here of four tokens."""
    decoder = make_decoder(max_seq_len=40)
    config = GenerationConfig(temperature=0, max_new_tokens=4, stop_tokens=())
    engine = Engine(decoder, max_sequences=1, prefix_caching=True)
    first = [1, 2, 3]
    engine.add(first, config)
    (answer,) = run(engine).values()
    shapes = consumed(decoder)
    for prompt, read in (
        ([*first, *answer, 9, 8], 5),  # the last token of an answer was never processed
        ([*first, *answer, 9, 7], 1),
        ([*first, *answer, 9], 4),  # the last token's logits are needed
        ([4] * 20, 20),
        ([4] * 20, 4),
        ([9, 2, 3, 4], 4),
    ):
        shapes.clear()
        engine.add(prompt, config)
        (tokens,) = run(engine).values()
        assert shapes[0] == (1, read)
        assert tokens == alone(decoder, prompt, config)[0]


def test_what_is_remembered_gives_way_to_what_is_needed(make_decoder):
    decoder = make_decoder()
    config = GenerationConfig(temperature=0, max_new_tokens=4, stop_tokens=())
    engine = Engine(decoder, max_sequences=1, max_tokens=24, prefix_caching=True)
    for number in range(9):
        prompt = [number + 1] * 16
        engine.add(prompt, config)
        assert list(run(engine).values()) == alone(decoder, prompt, config)


def test_a_prefix_is_found_behind_a_window(make_decoder):
    """With a window, the first blocks may be released: no later token attends to them."""
    decoder = make_decoder(max_seq_len=48, window=5)
    config = GenerationConfig(temperature=0, max_new_tokens=2, stop_tokens=())
    engine = Engine(decoder, max_sequences=1, max_tokens=48, prefix_caching=True)
    for number in range(12):
        for length in (4, 20):
            prompt = [number + 1] * length
            engine.add(prompt, config)
            assert list(run(engine).values()) == alone(decoder, prompt, config)
    assert is_empty(engine)


def test_an_exact_sequence_and_another_share_nothing(make_decoder):
    cache = Engine(make_decoder())._runner.cache
    keys = {TokenSequence([1] * 8, cache, exact=exact)._keys(2)[1] for exact in (False, True)}
    assert len(keys) == 2


def test_a_long_prompt_lets_the_others_go_on(make_decoder):
    engine = Engine(make_decoder(), max_sequences=2, token_budget=5)
    config = GenerationConfig(temperature=0, max_new_tokens=9, stop_tokens=())
    (first,) = engine.add([1, 2], config)
    engine.step()
    (second,) = engine.add([3] * 14, config)
    came = [[delta.index for delta in engine.step()] for _ in range(5)]
    assert came == [[first]] * 3 + [[first, second]] * 2


def test_those_beyond_the_rows_wait_their_turn(make_decoder):
    engine = Engine(make_decoder(), max_sequences=2)
    config = GenerationConfig(temperature=0, max_new_tokens=2, stop_tokens=())
    results = [engine.add([token], config)[0] for token in (1, 2, 3)]
    first, second, third = ({delta.index for delta in engine.step()} for _ in range(3))
    assert first == second == set(results[:2])
    assert third == {results[2]}


def test_processors_change_the_logits_of_their_own_request(make_decoder):
    decoder = make_decoder()
    config = GenerationConfig(temperature=0, max_new_tokens=6, stop_tokens=())
    seen: list[tuple[int, ...]] = []

    def only_even(logits, tokens):
        seen.append(tuple(tokens))
        return logits.index_fill(0, torch.arange(1, 17, 2), -torch.inf)

    engine = Engine(decoder, max_sequences=2)
    (even,) = engine.add([1, 2], config, processors=[only_even])
    (any_token,) = engine.add([1, 2], config)
    texts = run(engine)
    assert all(token % 2 == 0 for token in texts[even])
    assert texts[any_token] == alone(decoder, [1, 2], config)[0]
    assert seen[1] == (1, 2, texts[even][0])


def test_a_processor_that_writes_in_place_leaves_the_log_probabilities(make_decoder):
    decoder = make_decoder()
    config = GenerationConfig(temperature=0, max_new_tokens=3, logprobs=1)
    decoder.float()
    engine = Engine(decoder)
    engine.add([1], config, processors=[lambda logits, tokens: logits.zero_()])
    (first,) = engine.step()
    (known,) = generate(decoder, [[1]], config)
    assert first.token == 0
    assert first.logprob.top == known.logprobs[0].top


def test_stop_conditions_end_a_text(make_decoder, letters):
    decoder, tokenizer = make_decoder(), letters()
    config = GenerationConfig(temperature=0, max_new_tokens=9)
    whole = generate(decoder, [[1, 2]], config, tokenizer=tokenizer)[0]
    engine = Engine(decoder, tokenizer=tokenizer, max_sequences=1)
    engine.add([1, 2], config, stop_conditions=[lambda tokens, text: text == whole.text[:3]])
    deltas = []
    while not engine.is_idle:
        deltas += engine.step()
    assert [delta.token for delta in deltas] == list(whole.tokens[:3])
    assert deltas[-1].finish_reason == "stop"


def test_dropout_is_off_during_a_step_alone(make_decoder):
    decoder = make_decoder(dropout=0.5).train()
    engine = Engine(decoder, max_sequences=1)
    config = GenerationConfig(temperature=0, max_new_tokens=3, stop_tokens=())
    engine.add([1, 2, 3], config)
    tokens = []
    while not engine.is_idle:
        tokens += [delta.token for delta in engine.step()]
        assert decoder.training
    assert tokens == alone(decoder.eval(), [1, 2, 3], config)[0]


def test_a_draft_of_a_short_text_has_room(make_decoder):
    decoder, draft = make_decoder(max_seq_len=60), make_decoder(max_seq_len=60, seed=1)
    config = GenerationConfig(temperature=0, max_new_tokens=3)
    prompts = [[1] * 5, [2] * 40, [3] * 58]
    found = generate(decoder, prompts, config.replace(speculate=100), draft=draft)
    expected = generate(decoder, prompts, config)
    assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_no_prompts_give_no_texts(make_decoder):
    decoder = make_decoder()
    assert generate(decoder, []) == []
    assert generate(decoder, iter([]), GenerationConfig(beams=2)) == []
    assert list(stream(decoder, [])) == []


@pytest.mark.cuda
def test_a_gpu_that_looks_ahead_gives_the_same_texts(make_decoder):
    decoder = make_decoder().to("cuda")
    texts = []
    for ahead in (False, True):
        engine = Engine(decoder, max_sequences=3)
        engine.looks_ahead = ahead
        for number in range(5):
            engine.add([1, 2, number], GenerationConfig(max_new_tokens=9, seed=number))
        texts.append(run(engine))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "room", [{}, {"max_tokens": 48, "token_budget": 7, "prefix_caching": True}]
)
def test_prompt_logprobs_are_those_of_a_forward_pass(make_decoder, room):
    """Also if prompts are cut, preempted or share a prefix with an earlier one."""
    decoder = make_decoder(max_seq_len=24)
    engine = Engine(decoder, max_sequences=4, **room)
    pick = random.Random(5)
    prompts = [[1, 2, 3, 4] * 4 + [pick.randrange(17) for _ in range(n)] for n in range(8)]
    config = GenerationConfig(temperature=0, max_new_tokens=2, prompt_logprobs=3, n_samples=1)
    indices = [engine.add(prompt, config)[0] for prompt in [*prompts, [5]]]
    first: dict[int, tuple] = {}
    while not engine.is_idle:
        for delta in engine.step():
            assert (delta.prompt_logprobs is None) == (delta.index in first)
            first.setdefault(delta.index, delta.prompt_logprobs)
    assert first[indices[-1]] == ()  # nothing precedes a single token
    for index, prompt in zip(indices, prompts, strict=False):
        expected = decoder(torch.tensor([prompt]))[0, :-1].float().log_softmax(-1)
        of_tokens = expected.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert [one.token for one in first[index]] == prompt[1:]
        assert [one.logprob for one in first[index]] == pytest.approx(of_tokens.tolist(), abs=1e-6)
        best = expected.topk(3).indices.tolist()
        assert [[token for token, _ in one.top] for one in first[index]] == best


def test_a_sample_takes_over_a_prompt_with_its_logprobs(make_decoder):
    """The first sample is cancelled when a part of the prompt has been processed."""
    engine = Engine(make_decoder(), max_sequences=4, token_budget=7)
    prompt = [n % 17 for n in range(16)]
    first, second = engine.add(prompt, GenerationConfig(n_samples=2, seed=0, prompt_logprobs=0))
    assert engine.step() == []
    engine.cancel(first)
    delta, *_ = [delta for _ in range(3) for delta in engine.step()]
    assert delta.index == second
    assert [one.token for one in delta.prompt_logprobs] == prompt[1:]
