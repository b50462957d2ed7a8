"""Requests of a scheduler, and what became of them."""

from workhorse.generate import Scheduler, generate

ATTENTION = {
    "rope": {},
    "alibi": {"position": {"kind": "alibi"}},
    "window": {"window": 5},
    "chunk": {"chunk": 4},
}


def run(scheduler: Scheduler) -> dict[int, list[int]]:
    """All that comes until nothing is left, by result."""
    texts: dict[int, list[int]] = {}
    while not scheduler.is_idle:
        for delta in scheduler.step():
            texts.setdefault(delta.index, []).append(delta.token)
    return texts


def alone(decoder, prompt, config) -> list[list[int]]:
    return [list(done.tokens) for done in generate(decoder, [prompt], config)]


def is_empty(scheduler: Scheduler) -> bool:
    pools = scheduler._reader.cache.pools.values()
    return not any(pool.reserved or any(pool.holders) for pool in pools)
