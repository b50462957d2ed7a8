"""Steps that fail or are interrupted: every text goes on as if nothing had happened."""

import signal
from collections.abc import Sequence

import pytest

from tests.generate.scheduling import ATTENTION, alone, is_empty
from workhorse.generate import GenerationConfig, Scheduler, generate
from workhorse.generate.reader import Reader

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("at", range(6))
def test_what_fails_ahead_is_read_again(make_decoder, monkeypatch, at):
    """Wherever a pass fails, once, texts go on as if it had not."""
    decoder = make_decoder()
    config = GenerationConfig(max_new_tokens=6, seed=3, stop_tokens=())
    prompts = [1, 2, 3], [4, 5]
    expected = [alone(decoder, prompt, config)[0] for prompt in prompts]
    scheduler, passes = Scheduler(decoder, max_rows=2), iter(range(99))
    scheduler.looks_ahead = True
    plain = Reader._consume

    def consume(*given):
        if next(passes) == at:
            raise MemoryError
        return plain(*given)

    monkeypatch.setattr(Reader, "_consume", consume)
    for prompt in prompts:
        scheduler.add(prompt, config)
    texts: dict[int, list[int]] = {}
    failures = 0
    while not scheduler.is_idle:
        try:
            deltas = scheduler.step()
        except MemoryError:
            failures += 1
            continue
        for delta in deltas:
            texts.setdefault(delta.index, []).append(delta.token)
    assert failures == 1
    assert list(texts.values()) == expected


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
