"""The scheduler by itself: requests consist of integers, and no model runs."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from workhorse.generate.pace import FEWEST, FIRST, PromptPace
from workhorse.generate.scheduler import Scheduler
from workhorse.generate.sequence import PIECE, TokenSequence
from workhorse.nn.cache.paged import BLOCK, EMPTY, PagedCache

CONTEXT = 900
WINDOW = 100


@dataclass(eq=False)
class Job:
    """A request as the scheduler sees it: its arrival and its numbers of tokens."""

    index: int
    sequence: TokenSequence
    copies: "list[Job]"
    left: int
    guesses: int = 0
    client: str = ""
    rank: int = 0


def make(
    tokens: int, *, budget: int, sequences: int, prefix_caching: bool = False, slack: int = 0
) -> Scheduler:
    cache = PagedCache(tokens, sequences, torch.device("cpu"), CONTEXT, slack)
    for reach in (None, WINDOW):
        cache.pool(reach)
    return Scheduler(
        cache, token_budget=budget, max_sequences=sequences, prefix_caching=prefix_caching
    )


def job(
    scheduler: Scheduler, index: int, prompt: int, new: int, *, first: int = 0, exact: bool = False
) -> Job:
    """A request that shares its first tokens with others of the same `first`."""
    tokens = [first] * (prompt // 2) + [index] * (prompt - prompt // 2)
    return Job(index, TokenSequence(tokens, scheduler.cache, exact=exact), [], new)


def is_empty(scheduler: Scheduler) -> bool:
    pools = scheduler.cache.pools.values()
    return all(pool.available == pool.capacity and not any(pool.holders) for pool in pools)


def read(scheduler: Scheduler, *, guessing: bool = False) -> list[Job]:
    """Take a step as the engine does; returns the jobs that have ended."""
    for one in scheduler.running if guessing else ():
        if one.sequence.pending == 1:
            one.sequence.guessed = min(one.guesses, one.left - 1)
            one.sequence.tokens += [one.index] * one.sequence.guessed
    running = list(scheduler.running)
    step = scheduler.schedule()
    for one in set(running).difference(scheduler.running):  # preempted
        drop_guesses(one)
    assert sum(count for _, count in step) <= scheduler.token_budget
    assert len(scheduler.running) + sum(len(one.copies) for one in scheduler.running) <= (
        scheduler.max_sequences
    )
    for one, count in step:
        assert count > 0
        end = one.sequence.cached.length + count
        for reach, table in one.sequence.cached.tables.items():  # blocks for all tokens of the step
            assert len(table) >= -(-end // BLOCK)
            assert EMPTY not in table[scheduler.cache.oldest(end, reach) :]
        one.sequence.cached.length = end
    for one, _ in step:
        if one.sequence.pending == 0:
            take(scheduler, one)
    ended = [one for one, _ in step if one.left == 0]
    for one in ended:
        scheduler.remove(one)
    return ended


def take(scheduler: Scheduler, one: Job) -> None:
    """Give a job a new token once all its tokens are processed; its guesses were wrong."""
    sequence = one.sequence
    drop_guesses(one)
    sequence.tokens.append(one.index)
    scheduler.cache.truncate(sequence.cached, len(sequence.tokens) - 1)
    one.left -= 1
    for copy in one.copies:
        copy.sequence = sequence.fork(scheduler.cache)
        scheduler.join(copy)
    one.copies = []
    if scheduler.prefix_caching:
        sequence.label_prefix(scheduler.cache)


def drop_guesses(one: Job) -> None:
    del one.sequence.tokens[len(one.sequence.tokens) - one.sequence.guessed :]
    one.sequence.guessed = 0


def arrivals(pick: random.Random, scheduler: Scheduler, count: int, slack: int) -> Iterator[Job]:
    """Short and long prompts, exact ones, several samples, guesses."""
    index = 0
    while index < count:
        prompt = pick.choice((1, 5, pick.randint(1, 60), pick.randint(200, 700)))
        new = pick.choice((1, 3, pick.randint(1, 40)))
        exact = slack == 0 and pick.random() < 0.2
        one = job(scheduler, index, prompt, new, first=pick.randint(0, 3), exact=exact)
        one.guesses = pick.randint(0, slack)
        samples = pick.choice((1, 1, 1, 3))
        for sample in range(1, samples):
            one.copies.append(Job(index + sample, one.sequence, [], new, one.guesses))
        index += samples
        yield one


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("count", [2_000, pytest.param(25_000, marks=pytest.mark.slow)])
def test_any_load_is_served_within_its_budgets(count, slack, prefix_caching):
    """No budget is exceeded for random arrivals, lengths, cancellations and budgets."""
    pick = random.Random(f"{count} {slack} {prefix_caching}")
    served = 0
    while served < count:
        sequences = pick.randint(4, 12)
        scheduler = make(
            pick.choice((1000, 1500, 4000)),
            budget=pick.randint(PIECE + sequences * (1 + slack), 600),
            sequences=sequences,
            prefix_caching=prefix_caching,
            slack=slack,
        )
        coming = arrivals(pick, scheduler, min(500, count - served), slack)
        oldest, steps_of_oldest = None, 0
        is_over = False
        while not is_over or scheduler.waiting or scheduler.running:
            for _ in range(pick.choice((0, 0, 1, 3, 30))):
                one = next(coming, None)
                is_over = is_over or one is None
                if one is not None:
                    scheduler.add(one)
                    served += 1 + len(one.copies)
            if not (scheduler.waiting or scheduler.running):
                continue
            read(scheduler, guessing=slack > 0)
            everyone = [*scheduler.waiting, *scheduler.running]
            if everyone and pick.random() < 0.05:
                scheduler.remove(pick.choice(everyone))
            first = min(everyone, key=lambda one: one.index, default=None)
            steps_of_oldest = steps_of_oldest + 1 if first is oldest else 0
            oldest = first
            # The oldest processes at least one token per step: up to 700 of the prompt, 40 new.
            assert steps_of_oldest <= 700 + 40
        assert is_empty(scheduler)


def test_a_long_prompt_does_not_hold_up_short_ones() -> None:
    scheduler = make(4000, budget=100, sequences=8)
    scheduler.add(job(scheduler, 0, 800, 1))
    for index in range(1, 4):
        scheduler.add(job(scheduler, index, 20, 1))
    assert {one.index for one in read(scheduler)} == {1, 2, 3}


def test_a_piece_of_an_exact_prompt_is_read_beside_short_ones() -> None:
    scheduler = make(4000, budget=PIECE + 7, sequences=8)
    scheduler.add(job(scheduler, 0, 400, 1, exact=True))
    for index in range(1, 8):
        scheduler.add(job(scheduler, index, 90, 1))
    read(scheduler)
    assert scheduler.running[0].sequence.cached.length == PIECE


def test_a_request_that_fits_passes_one_that_does_not() -> None:
    """When the waiting request is the oldest, the newest is preempted and processed again."""
    scheduler = make(1000, budget=600, sequences=8)
    first, large, small = (
        job(scheduler, index, prompt, new)
        for index, (prompt, new) in enumerate(((500, 5), (850, 1), (200, 50)))
    )
    for one in (first, large, small):
        scheduler.add(one)
    read(scheduler)
    assert scheduler.running == [first, small]
    assert scheduler.waiting == [large]
    while first.left:
        read(scheduler)
    read(scheduler)
    assert scheduler.running[0] is large
    while small.left:
        read(scheduler)
    assert is_empty(scheduler)


def test_a_preempted_request_keeps_its_tokens() -> None:
    scheduler = make(300, budget=300, sequences=4)
    older, newer = job(scheduler, 0, 100, 250), job(scheduler, 1, 150, 150)
    scheduler.add(older)
    scheduler.add(newer)
    read(scheduler)
    known = 0
    while newer not in scheduler.waiting:
        known = len(newer.sequence.tokens)
        read(scheduler)
    assert newer.sequence.cached.length == 0
    assert len(newer.sequence.tokens) == known
    while older.left or newer.left:
        read(scheduler)
    assert is_empty(scheduler)


def test_a_cancelled_request_has_no_blocks_in_the_next_step() -> None:
    scheduler = make(1000, budget=600, sequences=4)
    one = job(scheduler, 0, 500, 9)
    scheduler.add(one)
    read(scheduler)
    scheduler.remove(one)
    assert is_empty(scheduler)


def test_clients_take_turns() -> None:
    """A client with one request does not wait for another client's many."""
    scheduler = make(10_000, budget=64, sequences=4)
    many = [job(scheduler, index, 8, 30) for index in range(20)]
    for one in many:
        scheduler.add(one)
    for _ in range(5):
        read(scheduler)
    assert scheduler.running == many[:4]
    few = [job(scheduler, 20 + index, 8, 30) for index in range(3)]
    for one in few:
        one.client = "other"
        scheduler.add(one)
    read(scheduler)
    assert set(scheduler.running) == {*many[:2], *few[:2]}
    steps, order = 0, list[int]()
    while scheduler.running or scheduler.waiting:
        order += [one.index for one in read(scheduler)]
        steps += 1
    assert steps < 23 * 40
    assert order.index(22) < order.index(6)  # the third of a few before the seventh of many
    assert is_empty(scheduler)


def test_prompts_do_not_hold_up_requests_that_decode() -> None:
    scheduler = make(10_000, budget=1000, sequences=4)
    scheduler.prompt_tokens = 32
    decoding = job(scheduler, 0, 8, 50)
    scheduler.add(decoding)
    read(scheduler)
    scheduler.add(job(scheduler, 1, 100, 1))
    counts = [sum(count for _, count in scheduler.schedule())]
    assert counts == [33]


def test_the_pace_of_prompts_follows_the_time_of_steps() -> None:
    pace = PromptPace(0.5)
    assert pace.tokens == FIRST
    for _ in range(30):
        pace.note(0, 0.020)
        pace.note(pace.tokens, 0.020 + 0.0002 * pace.tokens)
    assert pace.tokens == pytest.approx(0.5 * 0.020 / 0.0002, abs=1)
    pace.note(50, 60.0)  # the machine was busy
    assert pace.tokens > 25
    for _ in range(30):
        pace.note(pace.tokens, 1.0)
    assert pace.tokens == FEWEST
