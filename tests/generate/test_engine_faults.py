"""Steps that fail or are interrupted do not change any completion."""

import contextlib
import linecache
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import pytest
import torch

from tests.generate.serving import ATTENTION, alone, is_empty
from workhorse.errors import WorkhorseError
from workhorse.generate import Engine, GenerationConfig, generate
from workhorse.nn import Decoder

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("at", range(6))
def test_what_fails_ahead_is_read_again(make_decoder, monkeypatch, at):
    """A single failure of any pass does not change the completions."""
    decoder = make_decoder()
    config = GenerationConfig(max_new_tokens=6, seed=3, stop_tokens=())
    prompts = [1, 2, 3], [4, 5]
    expected = [alone(decoder, prompt, config)[0] for prompt in prompts]
    engine, passes = Engine(decoder, max_sequences=2), iter(range(99))
    engine.looks_ahead = True
    plain = Decoder.hidden

    def hidden(*given, **named):
        if next(passes) == at:
            raise MemoryError
        return plain(*given, **named)

    monkeypatch.setattr(Decoder, "hidden", hidden)
    for prompt in prompts:
        engine.add(prompt, config)
    texts: dict[int, list[int]] = {}
    failures = 0
    while not engine.is_idle:
        try:
            deltas = engine.step()
        except MemoryError:
            failures += 1
            continue
        for delta in deltas:
            texts.setdefault(delta.index, []).append(delta.token)
    assert failures == 1
    assert list(texts.values()) == expected


@pytest.mark.parametrize("budget", [None, 8])
@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
def test_a_step_that_was_broken_off_is_made_up_for(make_decoder, attention, budget):
    """Ctrl-C inside a layer, in each step in turn, does not change the completions."""
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
        engine = Engine(decoder, max_sequences=2, speculate=3, token_budget=budget)
        texts: list[list[int]] = [[], []]
        for prompt, how in prompts.items():
            engine.add(prompt, how)
        while not engine.is_idle:
            try:
                for delta in engine.step():
                    texts[delta.index].append(delta.token)
            except KeyboardInterrupt:
                pass
        assert texts == expected
        assert is_empty(engine)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
@pytest.mark.parametrize("option", ["processors", "stop_conditions", "tokenizer"])
def test_a_request_whose_own_function_raises_is_let_go_and_no_other(
    make_decoder, letters, monkeypatch, option, fails_at
):
    decoder, tokenizer = make_decoder(), letters()
    config = GenerationConfig(temperature=0, max_new_tokens=6, stop_tokens=())
    engine = Engine(decoder, max_sequences=3, tokenizer=tokenizer)
    calls: list[int] = []

    def fails(first, second=""):
        calls.append(0)
        if len(calls) == fails_at:
            raise LookupError
        return first if option == "processors" else second if option == "tokenizer" else False

    texts: list[list[int]] = [[], [], []]
    for number, prompt in enumerate(([1, 2], [3], [4, 5])):
        with monkeypatch.context() as patch:
            if number == 1 and option == "tokenizer":
                stream = tokenizer.stream(skip_special=True)
                stream.push = fails
                patch.setattr(tokenizer, "stream", lambda stream=stream, **_: stream)
            own = {option: [fails]} if number == 1 and option != "tokenizer" else {}
            engine.add(prompt, config, **own)
    faults = 0
    while not engine.is_idle:
        try:
            for delta in engine.step():
                texts[delta.index].append(delta.token)
        except LookupError:
            faults += 1
            assert set(engine.unfinished) == {0, 2}
    assert faults == 1
    assert [texts[0], texts[2]] == [alone(decoder, p, config)[0] for p in ([1, 2], [4, 5])]
    assert len(texts[1]) == fails_at - 1
    assert is_empty(engine)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("moment", range(1, 12))
def test_an_error_of_another_request_changes_no_text(make_decoder, moment, exact):
    decoder = make_decoder(max_seq_len=12)
    config = GenerationConfig(seed=5, max_new_tokens=12, truncate="left", exact=exact)
    (alone,) = generate(decoder, [[3] * 11], config)
    engine = Engine(decoder, max_sequences=2)

    def breaks(new: Sequence[int], _: str) -> bool:
        if len(new) == moment:
            raise ValueError
        return False

    engine.add([1], config, stop_conditions=[breaks])
    (result,) = engine.add([3] * 11, config)
    tokens = []
    while not engine.is_idle:
        try:
            deltas = engine.step()
        except ValueError:
            continue
        tokens += [delta.token for delta in deltas if delta.index == result]
    assert tokens == list(alone.tokens)


def add_all(engine: Engine, config: GenerationConfig) -> None:
    """Adds requests with samples, with guesses, and with a completion longer than the context."""
    for number in range(3):
        how = ({"n_samples": 2}, {"speculate": 2}, {"truncate": "left"})[number]
        engine.add([1, 2, 3, 1, 2, 3, number], config.replace(**how))


ATOMIC = " return deltas\n", "self._is_stepping = False\n"


class Interrupts:
    """Raises KeyboardInterrupt at the n-th executed line of the engine and the cache, from 1.

    Lines at which Python handles no signal are excluded: between the last statement of
    `Engine.step` and its return, and the single statement of its `finally`.
    """

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: object) -> "Interrupts | None":
        path = frame.f_code.co_filename
        if not any(part in path for part in ("workhorse/generate/", "workhorse/nn/cache/")):
            return None
        if event == "line" and not linecache.getline(path, frame.f_lineno).endswith(ATOMIC):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("share", range(8))
def test_an_interrupt_at_any_line_loses_no_token(make_decoder, letters, share):
    """The cache is so small that requests are preempted."""
    decoder = make_decoder(max_seq_len=14, window=6)
    config = GenerationConfig(max_new_tokens=9, seed=4, stop_tokens=(), temperature=0.7)
    options = {"tokenizer": letters(), "max_sequences": 4, "max_tokens": 24, "speculate": 2}
    texts: list[dict[int, list[tuple[int, str, str | None]]]] = []
    for at in (0, *range(share + 1, 20_000, 8 * 91)):
        engine, interrupts = Engine(decoder, **options, prefix_caching=True), Interrupts(at)
        add_all(engine, config)
        found: dict[int, list[tuple[int, str, str | None]]] = {}
        while not engine.is_idle:
            try:
                sys.settrace(interrupts)
                deltas = engine.step()
            except KeyboardInterrupt:
                deltas = []
            finally:
                sys.settrace(None)
            for delta in deltas:
                what = delta.token, delta.text, delta.finish_reason  # guesses may be lost
                found.setdefault(delta.index, []).append(what)
        assert is_empty(engine)
        texts.append(found)
        if interrupts.left > 0:
            break
    assert len(texts) > 9
    assert all(found == texts[0] for found in texts)


def test_a_token_is_taken_again_after_an_interrupt_of_a_stop_condition(make_decoder):
    decoder = make_decoder()
    engine = Engine(decoder, max_sequences=1)
    config = GenerationConfig(temperature=0, max_new_tokens=3)
    moments = {1, 2, 3}

    def interrupts(new: Sequence[int], _: str) -> bool:
        if len(new) in moments:
            moments.remove(len(new))
            signal.raise_signal(signal.SIGINT)
        return False

    engine.add([1, 2], config, stop_conditions=[interrupts])
    tokens, interrupted = [], 0
    while not engine.is_idle:
        try:
            tokens += [delta.token for delta in engine.step()]
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == 3
    assert tokens == list(generate(decoder, [[1, 2]], config)[0].tokens)


def test_an_interrupt_ends_a_pass_at_once(make_decoder):
    decoder = make_decoder()
    engine = Engine(decoder, max_sequences=1)
    engine.add([1, 2], GenerationConfig(temperature=0, max_new_tokens=3))
    reached = []

    def interrupt(*_: object) -> None:
        handle.remove()
        signal.raise_signal(signal.SIGINT)
        reached.append("after")

    handle = decoder.layers[0].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    count = 0
    while not engine.is_idle:
        count += len(engine.step())
    assert count == 3


def drain(engine: Engine, result: int, *expected: type[BaseException]) -> list[int]:
    """Returns the tokens of a completion; steps may raise the expected exceptions."""
    tokens: list[int] = []
    for _ in range(200):
        if engine.is_idle:
            break
        with contextlib.suppress(*expected):
            tokens += [delta.token for delta in engine.step() if delta.index == result]
    assert engine.is_idle
    assert is_empty(engine)
    return tokens


@pytest.mark.parametrize("prompt", [24, 28, 40])
def test_guesses_are_dropped_when_a_request_is_preempted_and_starts_again_at_once(
    make_decoder, prompt
):
    decoder = make_decoder(max_seq_len=256)
    plain = GenerationConfig(seed=7, stop_tokens=())
    guessing = plain.replace(temperature=0, speculate=3, max_new_tokens=18)
    tokens = ([7, 8, 9] * 14)[:prompt]
    for new in range(5, 14):
        engine = Engine(decoder, max_sequences=5, token_budget=20, speculate=3)
        engine.add([1, 2], plain.replace(n_samples=2, max_new_tokens=new))
        engine.add([3, 4, 5], plain.replace(n_samples=4, max_new_tokens=5))
        engine.add([6] * 240, plain.replace(n_samples=2, max_new_tokens=3))
        (result,) = engine.add(tokens, guessing)
        assert drain(engine, result) == alone(decoder, tokens, guessing)[0]


@pytest.mark.parametrize("truncate", ["refuse", "left"])
def test_an_error_of_another_request_changes_no_draw_of_a_draft(make_decoder, truncate):
    decoder, draft = make_decoder(max_seq_len=24), make_decoder(max_seq_len=24, seed=1)

    def breaks(logits, tokens):
        if len(tokens) == 6:
            raise ValueError
        return logits

    for seed in range(5):
        config = GenerationConfig(
            max_new_tokens=20, speculate=2, seed=seed, stop_tokens=(), truncate=truncate
        )
        engine = Engine(decoder, draft=draft, max_sequences=3, speculate=2)
        engine.add([1, 2], GenerationConfig(seed=3), processors=[breaks])
        (result,) = engine.add([4, 5, 6], config)
        (expected,) = generate(decoder, [[4, 5, 6]], config, draft=draft)
        assert drain(engine, result, ValueError) == list(expected.tokens)


@pytest.mark.parametrize("at", range(5, 60, 9))
def test_requests_survive_an_interrupt_of_add_and_of_cancel(make_decoder, at):
    decoder = make_decoder(max_seq_len=8)
    config = GenerationConfig(max_new_tokens=9, temperature=0, stop_tokens=(), truncate="left")
    for operation in ("add", "cancel"):
        engine = Engine(decoder, max_sequences=4)
        (first,) = engine.add([1, 2, 3], config)
        engine.add([3], config)
        tokens = [delta.token for _ in range(6) for delta in engine.step() if delta.index == first]
        try:
            sys.settrace(Interrupts(at))
            engine.add([5, 6, 7], config) if operation == "add" else engine.cancel(1)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        engine.add([9], config)
        assert tokens + drain(engine, first) == alone(decoder, [1, 2, 3], config)[0]


def test_an_interrupt_of_a_recovery_is_recovered_from(make_decoder, monkeypatch):
    decoder, raised = make_decoder(), []
    config = GenerationConfig(max_new_tokens=8, temperature=0, stop_tokens=())
    engine = Engine(decoder, max_sequences=4)
    engine.looks_ahead = True
    (result,) = engine.add([1, 2, 3], config)

    def breaks(new, _):
        if len(new) == 3 and not raised:
            raised.append("condition")
            raise ValueError
        return False

    engine.add([8], config, stop_conditions=[breaks])
    recover = Engine._recover

    def interrupted(self, **options):
        if raised == ["condition"]:
            raised.append("recovery")
            raise KeyboardInterrupt
        recover(self, **options)

    monkeypatch.setattr(Engine, "_recover", interrupted)
    found = drain(engine, result, ValueError, KeyboardInterrupt)
    assert raised == ["condition", "recovery"]
    assert found == alone(decoder, [1, 2, 3], config)[0]


@pytest.mark.parametrize("broken", ["processor", "draft"])
def test_logits_that_give_no_token_drop_their_own_request(make_decoder, broken):
    decoder, draft = make_decoder(), make_decoder(seed=1)
    if broken == "draft":
        draft.head.proj.weight.data.fill_(torch.nan)
    engine = Engine(decoder, draft=draft, max_sequences=3, speculate=2)

    def enlarges(logits, tokens):
        logits[5] = torch.finfo(torch.float32).max
        return logits

    config = GenerationConfig(max_new_tokens=6, temperature=0.7, seed=1, stop_tokens=())
    (result,) = engine.add([1, 2, 3], config)
    if broken == "draft":
        engine.add([4, 5], config.replace(speculate=2))
    else:
        engine.add([4, 5], config, processors=[enlarges])
    assert drain(engine, result, WorkhorseError) == alone(decoder, [1, 2, 3], config)[0]


def test_a_draft_with_a_longer_context_than_the_model(make_decoder):
    decoder, draft = make_decoder(max_seq_len=16), make_decoder(max_seq_len=256, seed=1)
    config = GenerationConfig(max_new_tokens=90, truncate="left", speculate=2, stop_tokens=())
    (found,) = generate(decoder, [[1, 2, 3]], config, draft=draft)
    assert len(found.tokens) == 90


def test_a_step_inside_a_step_is_refused(make_decoder):
    engine = Engine(make_decoder(), max_sequences=2)
    config = GenerationConfig(max_new_tokens=3, temperature=0, stop_tokens=())
    engine.add([1, 2], config, processors=[lambda logits, tokens: engine.step()])
    (result,) = engine.add([3], config)
    with pytest.raises(WorkhorseError, match="step was called inside a step; return from"):
        engine.step()
    assert drain(engine, result) == alone(engine.decoder, [3], config)[0]
