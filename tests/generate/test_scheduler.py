"""Requests that come and leave at any time: each text is the one it would be alone."""

import random
import re
import signal
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from workhorse.errors import WorkhorseError
from workhorse.generate import GenerationConfig, Scheduler, generate, prefixes, stream

ATTENTION = {
    "rope": {},
    "alibi": {"position": {"kind": "alibi"}},
    "window": {"window": 5},
    "chunk": {"chunk": 4},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four tokens, so that short texts share and lose some."""
    for module in ("nn.cache.blocks", "nn.cache.paged", "nn.cache.paged_view"):
        monkeypatch.setattr(f"workhorse.{module}.BLOCK", 4)
    for module in ("prefixes", "reader"):
        monkeypatch.setattr(f"workhorse.generate.{module}.BLOCK", 4)


def run(scheduler: Scheduler) -> dict[int, list[int]]:
    """All that comes until nothing is left, by result."""
    texts: dict[int, list[int]] = {}
    while not scheduler.is_idle:
        for delta in scheduler.step():
            texts.setdefault(delta.index, []).append(delta.token)
    return texts


def alone(decoder, prompt, config) -> list[list[int]]:
    return [list(done.tokens) for done in generate(decoder, [prompt], config)]


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


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
def test_texts_do_not_depend_on_what_comes_and_leaves(make_decoder, attention, chunk):
    decoder = make_decoder(max_seq_len=24, **attention)
    pick = random.Random(7)
    scheduler = Scheduler(
        decoder, max_rows=6, max_tokens=120, speculate=3, prompt_chunk=chunk, remembers=True
    )
    requests, cancelled = {}, set()
    texts: dict[int, list[int]] = {}
    for seed in range(40):
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


def test_a_processor_that_forbids_everything_is_told(make_decoder):
    scheduler = Scheduler(make_decoder(), max_rows=1)
    scheduler.add([1], processors=[lambda logits, tokens: logits - torch.inf])
    with pytest.raises(WorkhorseError, match="a logit processor forbids every token"):
        scheduler.step()


def is_empty(scheduler: Scheduler) -> bool:
    pools = scheduler._reader.cache.pools.values()
    return not any(pool.reserved or any(pool.holders) for pool in pools)


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
def test_a_step_that_was_broken_off_is_made_up_for(make_decoder, attention, chunk):
    """Ctrl-C within a layer, in each step at a time: every text is as it would have been."""
    decoder = make_decoder(max_seq_len=14, **attention)
    config = GenerationConfig(temperature=0, max_new_tokens=9, stop_tokens=(), truncate="left")
    guessing = config.replace(speculate=3)
    prompts = {(1, 2, 3): config, (4, 5, 4, 5, 4, 5, 4): guessing}
    expected = [alone(decoder, prompt, how)[0] for prompt, how in prompts.items()]
    left = 0

    def interrupt(module, args, output):
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    decoder.layers[1].register_forward_hook(interrupt)
    for call in range(1, 12):
        left = call
        scheduler = Scheduler(decoder, max_rows=2, speculate=3, prompt_chunk=chunk)
        texts: list[list[int]] = [[], []]
        for prompt, how in prompts.items():
            scheduler.add(prompt, how)
        while not scheduler.is_idle:
            try:
                for delta in scheduler.step():
                    texts[delta.index].append(delta.token)
            except KeyboardInterrupt:
                pass
        assert texts == expected
        assert is_empty(scheduler)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
@pytest.mark.parametrize("option", ["processors", "stop_conditions"])
def test_a_request_whose_own_function_raises_is_let_go_and_no_other(make_decoder, option, fails_at):
    decoder = make_decoder()
    config = GenerationConfig(temperature=0, max_new_tokens=6, stop_tokens=())
    scheduler = Scheduler(decoder, max_rows=3)
    calls: list[int] = []

    def fails(first, second):
        calls.append(0)
        if len(calls) == fails_at:
            raise LookupError
        return first if option == "processors" else False

    texts: list[list[int]] = [[], [], []]
    for prompt, functions in (([1, 2], {}), ([3], {option: [fails]}), ([4, 5], {})):
        scheduler.add(prompt, config, **functions)
    faults = 0
    while not scheduler.is_idle:
        try:
            for delta in scheduler.step():
                texts[delta.index].append(delta.token)
        except LookupError:
            faults += 1
    assert faults == 1
    assert [texts[0], texts[2]] == [alone(decoder, p, config)[0] for p in ([1, 2], [4, 5])]
    assert len(texts[1]) == fails_at - 1
    assert is_empty(scheduler)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda logits, tokens: None, "a logit processor returned None"),
        (lambda logits, tokens: logits[:5], r"returned \(5,\); return logits, \(17,\)"),
        (lambda logits, tokens: logits * torch.nan, "returned nan or inf"),
        (lambda logits, tokens: logits + torch.inf, "returned nan or inf"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_processors_that_give_no_logits_are_told(make_decoder, processor, message, temperature):
    scheduler = Scheduler(make_decoder())
    scheduler.add([1], GenerationConfig(temperature=temperature), processors=[processor])
    with pytest.raises(WorkhorseError, match=message):
        scheduler.step()
    assert scheduler.is_idle
    assert is_empty(scheduler)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 2}, "beams=2 gives its text only at the end"),
        ({"speculate": 2, "temperature": 0}, "speculate=2 is more than this scheduler guesses, 0"),
        ({"n_samples": 3}, "n_samples=3 is more than the 2 rows of this scheduler"),
        ({"max_new_tokens": 20}, "1 × 22 tokens do not fit a cache of 8; ask for fewer"),
    ],
)
def test_what_can_never_be_done_is_refused_when_asked(make_decoder, options, message):
    scheduler = Scheduler(make_decoder(), max_rows=2, max_tokens=8)
    with pytest.raises(WorkhorseError, match=message):
        scheduler.add([1, 2, 3], GenerationConfig(**options))
    assert scheduler.is_idle


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[(size, value) for size in ("max_rows", "max_tokens") for value in (0, True, 1.5, "3")],
        *[("prompt_chunk", value) for value in (0, -1, False, 2.0)],
        *[("speculate", value) for value in (-1, True, None)],
        *[("max_rows", 2**40), ("max_tokens", 2**70), ("remembers", 1)],
        *[("draft", "a model"), ("tokenizer", "a folder"), ("decoder", None)],
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(make_decoder, option, value):
    fact = (
        "does not fit into memory" if value in (2**40, 2**70) else rf"{option}=.* (is|are) .*; give"
    )
    with pytest.raises(WorkhorseError, match=fact):
        Scheduler(**{"decoder": make_decoder(), option: value})


@pytest.mark.parametrize("size", [np.int64(3), 3])
def test_sizes_may_be_of_numpy(make_decoder, size):
    decoder = make_decoder()
    config = GenerationConfig(temperature=0, max_new_tokens=3, stop_tokens=())
    scheduler = Scheduler(
        decoder, max_rows=size, max_tokens=size * 16, prompt_chunk=size, speculate=size
    )
    (result,) = scheduler.add(np.array([1, 2, 3, 4]), config)
    assert run(scheduler)[result] == alone(decoder, [1, 2, 3, 4], config)[0]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        *[(prompt, {}) for prompt in (None, 5, "abc", b"ab", [1.0], [True], ["a"], [[1]], {1, 2})],
        *[(torch.tensor(tokens), {}) for tokens in (1, [1.5], [[1, 2]])],
        *[([1], {"config": config}) for config in ({}, 0, {"max_new_tokens": 3})],
        *[([1], {"processors": processors}) for processors in (None, "f", [5], len)],
        *[([1], {"stop_conditions": conditions}) for conditions in (None, [None], len)],
    ],
)
def test_a_request_of_other_types_is_refused_and_changes_nothing(make_decoder, prompt, options):
    scheduler = Scheduler(make_decoder())
    with pytest.raises(WorkhorseError, match=r"^[^\n]+; [^\n]+$"):
        scheduler.add(prompt, **options)
    assert scheduler.is_idle
    assert scheduler.add([1]) == range(1)


@pytest.mark.parametrize("result", [1, -1, None, True, "0", 0.0, range(1)])
def test_what_was_never_asked_for_cannot_be_cancelled(make_decoder, result):
    scheduler = Scheduler(make_decoder())
    scheduler.add([1])
    with pytest.raises(WorkhorseError, match="result="):
        scheduler.cancel(result)
    scheduler.cancel(0)
    scheduler.cancel(0)
    assert scheduler.is_idle


def test_a_decoder_without_weights_is_refused(make_decoder):
    with pytest.raises(WorkhorseError, match="a decoder on the device meta has no weights"):
        Scheduler(make_decoder().to("meta"))


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


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("moment", range(1, 12))
def test_an_error_of_another_request_changes_no_text(make_decoder, moment, exact):
    decoder = make_decoder(max_seq_len=12)
    config = GenerationConfig(seed=5, max_new_tokens=12, truncate="left", exact=exact)
    (alone,) = generate(decoder, [[3] * 11], config)
    scheduler = Scheduler(decoder, max_rows=2)

    def breaks(new: Sequence[int], _: str) -> bool:
        if len(new) == moment:
            raise ValueError
        return False

    scheduler.add([1], config, stop_conditions=[breaks])
    (result,) = scheduler.add([3] * 11, config)
    tokens = []
    while not scheduler.is_idle:
        try:
            deltas = scheduler.step()
        except ValueError:
            continue
        tokens += [delta.token for delta in deltas if delta.index == result]
    assert tokens == list(alone.tokens)


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_an_interrupt_waits_for_what_must_not_be_left_half_done(make_decoder, moment):
    decoder = make_decoder()
    scheduler = Scheduler(decoder, max_rows=1)
    config = GenerationConfig(temperature=0, max_new_tokens=3)

    def interrupts(new: Sequence[int], _: str) -> bool:
        if len(new) == moment:
            signal.raise_signal(signal.SIGINT)
        return False

    scheduler.add([1, 2], config, stop_conditions=[interrupts])
    tokens, interrupted = [], 0
    while not scheduler.is_idle:
        try:
            tokens += [delta.token for delta in scheduler.step()]
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == 1
    assert tokens == list(generate(decoder, [[1, 2]], config)[0].tokens)


def test_an_interrupt_ends_a_pass_at_once(make_decoder):
    decoder = make_decoder()
    scheduler = Scheduler(decoder, max_rows=1)
    scheduler.add([1, 2], GenerationConfig(temperature=0, max_new_tokens=3))
    reached = []

    def interrupt(*_: object) -> None:
        handle.remove()
        signal.raise_signal(signal.SIGINT)
        reached.append("after")

    handle = decoder.layers[0].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    assert not reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    count = 0
    while not scheduler.is_idle:
        count += len(scheduler.step())
    assert count == 3


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"temperature": 0}}, "config={'temperature': 0} is not a GenerationConfig"),
        ({"decoder": None}, "decoder=None is not a decoder; give a model's .decoder"),
        ({"tokenizer": 3}, "tokenizer=3 is not a tokenizer; give a model's .tokenizer"),
        ({"draft": "m"}, "draft='m' is not a decoder; give a model's .decoder"),
        ({"prompts": None}, "prompts=None is not a list; give a list of prompts"),
        ({"prompts": "ab"}, "prompts='ab' is not a list; give a list of prompts"),
    ],
)
@pytest.mark.parametrize("function", [generate, stream])
def test_what_cannot_generate(make_decoder, function, arguments, message):
    given = {"decoder": make_decoder(), "prompts": [[1]], **arguments}
    with pytest.raises(WorkhorseError, match=re.escape(message)):
        function(**given)
