"""Helpers that run the requests of an engine."""

from workhorse.generate import Engine, generate

ATTENTION = {
    "rope": {},
    "alibi": {"position": {"kind": "alibi"}},
    "window": {"window": 5},
    "chunk": {"chunk": 4},
}


def run(engine: Engine) -> dict[int, list[int]]:
    """Step until the engine is idle; returns the tokens of each completion."""
    texts: dict[int, list[int]] = {}
    while not engine.is_idle:
        for delta in engine.step():
            texts.setdefault(delta.index, []).append(delta.token)
    return texts


def alone(decoder, prompt, config) -> list[list[int]]:
    return [list(done.tokens) for done in generate(decoder, [prompt], config)]


def is_empty(engine: Engine) -> bool:
    pools = engine._runner.cache.pools.values()
    return all(pool.available == pool.capacity and not any(pool.holders) for pool in pools)
