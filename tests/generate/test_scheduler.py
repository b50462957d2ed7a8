"""Requests that come and leave at any time: each text is the one it would be alone."""

import random

import pytest
import torch

from tests.generate.scheduling import ATTENTION, alone, run
from workhorse.devices.to_host import ToHost
from workhorse.generate import GenerationConfig, Scheduler, generate, prefixes, stream
from workhorse.generate.reader import Reader

pytestmark = pytest.mark.usefixtures("small_blocks")


def random_request(pick: random.Random, seed: int) -> tuple[list[int], GenerationConfig]:
    """Prompts that often begin alike, and every way to choose."""
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
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
def test_texts_do_not_depend_on_what_comes_and_leaves(make_decoder, attention, chunk, ahead):
    decoder = make_decoder(max_seq_len=24, **attention)
    pick = random.Random(7)
    scheduler = Scheduler(
        decoder, max_rows=6, max_tokens=120, speculate=3, prompt_chunk=chunk, remembers=not ahead
    )
    scheduler.looks_ahead = ahead
    requests, cancelled = {}, set()
    texts: dict[int, list[int]] = {}
    for seed in range(20):
        prompt, config = random_request(pick, seed)
        for sample, result in enumerate(scheduler.add(prompt, config)):
            requests[result] = prompt, config, sample
        for _ in range(pick.randint(0, 4)):
            for delta in scheduler.step():
                texts.setdefault(delta.index, []).append(delta.token)
        if pick.random() < 0.3:
            scheduler.cancel(gone := pick.choice(list(requests)))
            cancelled.add(gone)
    for result, tokens in run(scheduler).items():
        texts.setdefault(result, []).extend(tokens)
    for result, (prompt, config, sample) in requests.items():
        expected = alone(decoder, prompt, config)[sample]
        found = texts.get(result, [])
        assert found == expected[: len(found)]
        assert len(found) == len(expected) or result in cancelled


def test_a_token_is_read_before_the_host_knows_it(make_decoder, monkeypatch):
    """But the first, after the prompt, and the last, after which nothing follows."""
    seen: list[str] = []
    plain_wait, plain_ahead = ToHost.wait, Reader.read_ahead
    monkeypatch.setattr(ToHost, "wait", lambda self: seen.append("known") or plain_wait(self))
    monkeypatch.setattr(
        Reader, "read_ahead", lambda *given: seen.append("read") or plain_ahead(*given)
    )
    decoder = make_decoder()
    scheduler = Scheduler(decoder, max_rows=1)
    scheduler.looks_ahead = True
    config = GenerationConfig(temperature=0, max_new_tokens=4, stop_tokens=())
    scheduler.add([1, 2, 3], config)
    found = run(scheduler)
    assert seen == ["known", *["read", "known"] * 2, "known"]
    assert list(found.values()) == alone(decoder, [1, 2, 3], config)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_processor_may_cancel_its_own_text(make_decoder, rows):
    """Which is closed before it could be read ahead."""
    decoder = make_decoder(max_seq_len=24)
    scheduler = Scheduler(decoder, max_rows=rows)
    scheduler.looks_ahead = True
    config = GenerationConfig(temperature=0, max_new_tokens=12, stop_tokens=())

    def processor(logits, tokens):
        if len(tokens) == 8:
            scheduler.cancel(0)
        return logits

    scheduler.add([1, 2, 3], config, processors=[processor])
    for number in range(1, rows):
        scheduler.add([1, 2, number], config)
    texts = run(scheduler)
    assert not scheduler._reader._ahead
    for number in range(1, rows):
        assert [texts[number]] == alone(decoder, [1, 2, number], config)


def test_nothing_is_left_of_those_that_ended(make_decoder):
    scheduler = Scheduler(make_decoder(), max_rows=3)
    for number in range(5):
        scheduler.add([1, 2, number], GenerationConfig(max_new_tokens=9, n_samples=2))
    scheduler.step()
    scheduler.cancel(0)
    scheduler.cancel(9)
    run(scheduler)
    for pool in scheduler._reader.cache.pools.values():
        assert not pool.reserved
        assert not any(pool.holders)


def test_a_prompt_that_begins_alike_is_read_from_where_it_differs(make_decoder, consumed):
    decoder = make_decoder(max_seq_len=40)
    config = GenerationConfig(temperature=0, max_new_tokens=4, stop_tokens=())
    scheduler = Scheduler(decoder, max_rows=1, remembers=True)
    first = [1, 2, 3]
    scheduler.add(first, config)
    (answer,) = run(scheduler).values()
    shapes = consumed(decoder)
    for prompt, read in (
        # The last token of an answer was never consumed, so it is read with the next turn.
        ([*first, *answer, 9, 8], 3),
        ([*first, *answer, 9, 7], 1),
        ([1, 2, 3], 1),  # the last token's logits are wanted
        ([4] * 20, 20),
        ([9, 2, 3, 4], 4),
    ):
        shapes.clear()
        scheduler.add(prompt, config)
        (tokens,) = run(scheduler).values()
        assert shapes[0] == (1, read)
        assert tokens == alone(decoder, prompt, config)[0]


def test_what_is_remembered_gives_way_to_what_is_needed(make_decoder):
    decoder = make_decoder()
    config = GenerationConfig(temperature=0, max_new_tokens=4, stop_tokens=())
    scheduler = Scheduler(decoder, max_rows=1, max_tokens=24, remembers=True)
    for number in range(9):
        prompt = [number + 1] * 16
        scheduler.add(prompt, config)
        assert list(run(scheduler).values()) == alone(decoder, prompt, config)


def test_what_a_window_let_go_of_does_not_keep_what_came_before_it(make_decoder):
    """Nodes without blocks of a window stand behind nodes that hold some, and those fill it."""
    decoder = make_decoder(max_seq_len=48, window=5)
    config = GenerationConfig(temperature=0, max_new_tokens=2, stop_tokens=())
    scheduler = Scheduler(decoder, max_rows=1, max_tokens=48, remembers=True)
    for number in range(12):
        for length in (4, 20):
            prompt = [number + 1] * length
            scheduler.add(prompt, config)
            assert list(run(scheduler).values()) == alone(decoder, prompt, config)


def test_finding_a_beginning_among_many_looks_at_few(make_decoder, monkeypatch):
    scheduler = Scheduler(make_decoder(), max_rows=1, max_tokens=2000, remembers=True)
    config = GenerationConfig(temperature=0, max_new_tokens=1, stop_tokens=())
    looked: list[int] = []
    agreed = prefixes._agreed
    monkeypatch.setattr(prefixes, "_agreed", lambda *both: looked.append(0) or agreed(*both))
    for number in range(150):
        scheduler.add([1, number % 15, number // 15, 2, 3], config)
        run(scheduler)
    assert len(looked) <= 2 * 2 * 150


def test_a_long_prompt_lets_the_others_go_on(make_decoder):
    scheduler = Scheduler(make_decoder(), max_rows=2, prompt_chunk=4)
    config = GenerationConfig(temperature=0, max_new_tokens=9, stop_tokens=())
    (first,) = scheduler.add([1, 2], config)
    scheduler.step()
    (second,) = scheduler.add([3] * 14, config)
    came = [[delta.index for delta in scheduler.step()] for _ in range(5)]
    assert came == [[first]] * 3 + [[second, first], [first, second]]


def test_those_beyond_the_rows_wait_their_turn(make_decoder):
    scheduler = Scheduler(make_decoder(), max_rows=2)
    config = GenerationConfig(temperature=0, max_new_tokens=2, stop_tokens=())
    results = [scheduler.add([token], config)[0] for token in (1, 2, 3)]
    first, second, third = ({delta.index for delta in scheduler.step()} for _ in range(3))
    assert first == second == set(results[:2])
    assert third == {results[2]}


def test_processors_change_the_logits_of_their_own_request(make_decoder):
    decoder = make_decoder()
    config = GenerationConfig(temperature=0, max_new_tokens=6, stop_tokens=())
    seen: list[tuple[int, ...]] = []

    def only_even(logits, tokens):
        seen.append(tuple(tokens))
        return logits.index_fill(0, torch.arange(1, 17, 2), -torch.inf)

    scheduler = Scheduler(decoder, max_rows=2)
    (even,) = scheduler.add([1, 2], config, processors=[only_even])
    (any_token,) = scheduler.add([1, 2], config)
    texts = run(scheduler)
    assert all(token % 2 == 0 for token in texts[even])
    assert texts[any_token] == alone(decoder, [1, 2], config)[0]
    assert seen[1] == (1, 2, texts[even][0])


def test_a_processor_that_writes_in_place_leaves_the_log_probabilities(make_decoder):
    decoder = make_decoder()
    config = GenerationConfig(temperature=0, max_new_tokens=3, logprobs=1)
    decoder.float()
    scheduler = Scheduler(decoder)
    scheduler.add([1], config, processors=[lambda logits, tokens: logits.zero_()])
    (first,) = scheduler.step()
    (known,) = generate(decoder, [[1]], config)
    assert first.token == 0
    assert first.logprob.top == known.logprobs[0].top


def test_stop_conditions_end_a_text(make_decoder, letters):
    decoder, tokenizer = make_decoder(), letters()
    config = GenerationConfig(temperature=0, max_new_tokens=9)
    whole = generate(decoder, [[1, 2]], config, tokenizer=tokenizer)[0]
    scheduler = Scheduler(decoder, tokenizer=tokenizer, max_rows=1)
    scheduler.add([1, 2], config, stop_conditions=[lambda tokens, text: text == whole.text[:3]])
    deltas = []
    while not scheduler.is_idle:
        deltas += scheduler.step()
    assert [delta.token for delta in deltas] == list(whole.tokens[:3])
    assert deltas[-1].finish_reason == "stop"


def test_dropout_is_off_during_a_step_alone(make_decoder):
    decoder = make_decoder(dropout=0.5).train()
    scheduler = Scheduler(decoder, max_rows=1)
    config = GenerationConfig(temperature=0, max_new_tokens=3, stop_tokens=())
    scheduler.add([1, 2, 3], config)
    tokens = []
    while not scheduler.is_idle:
        tokens += [delta.token for delta in scheduler.step()]
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
        scheduler = Scheduler(decoder, max_rows=3)
        scheduler.looks_ahead = ahead
        for number in range(5):
            scheduler.add([1, 2, number], GenerationConfig(max_new_tokens=9, seed=number))
        texts.append(run(scheduler))
    assert texts[0] == texts[1]
