"""Passes of a decoder that is loaded for generation, without the choice of tokens."""

import torch

import workhorse
from benchmarks.contestants.ours import LOAD_OPTIONS
from benchmarks.harness.limits import seconds_of
from benchmarks.harness.models import huggingface_folder
from benchmarks.harness.shapes import TUNING
from benchmarks.harness.tokens import random_tokens
from benchmarks.harness.worker import Round
from workhorse.generate.runner import Chunk, Runner
from workhorse.native import resolve


def passes(
    *,
    shape: str,
    precision: str,
    exact: bool,
    sequences: int,
    prompt: int,
    steps: int,
    models: str,
    threads: int,
) -> Round:
    """Rounds of `steps` decode steps after the prompts, or of one pass over the prompts."""
    torch.set_num_threads(threads)
    resolve("decoding", "steps", "matrix_unit", "vectors", wait=True)
    folder = huggingface_folder(shape, models)
    backend = workhorse.load(
        folder, exact=exact, notify=lambda _line: None, **LOAD_OPTIONS[precision]
    ).backend
    assert backend.is_invariant == exact
    prompts = random_tokens(sequences, prompt, TUNING[shape].vocab_size)

    def take() -> dict[str, float]:
        runner = Runner(backend, tokens=sequences * (prompt + steps), sequences=sequences)
        texts = [runner.new_sequence(tokens) for tokens in prompts]

        def read(count: int) -> None:
            runner.run([Chunk(one, count) for one in texts])

        def step() -> None:
            for _ in range(steps):
                for one in texts:
                    one.tokens.append(one.tokens[-1])
                read(1)

        seconds = seconds_of(lambda: read(prompt), "cpu")
        if steps:
            seconds = seconds_of(step, "cpu")
        return {"tokens": sequences * (steps or prompt) / seconds}

    take()
    return take
