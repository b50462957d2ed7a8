"""Workloads of Workhorse without peers, for `busy` and `this_machine`."""

from typing import NamedTuple

from benchmarks.contestants.generating import OURS, asked
from benchmarks.contestants.limits import prompt_products, training_products, weights_read
from benchmarks.harness.contest import Limit
from benchmarks.harness.shapes import DECODING, NEW_TOKENS, PROMPT_TOKENS, TRAINING
from benchmarks.harness.worker import Contestant


class Measure(NamedTuple):
    """A measured rate in tokens per second."""

    name: str
    """Name of its row in docs/performance.md."""
    limit: Limit


class Work(NamedTuple):
    """A contestant, and the measures of one of its rounds."""

    contestant: Contestant
    measures: dict[str, Measure]


def training(shape: str, dtype: str) -> Work:
    """Training steps."""
    name = f"train {shape}, {dtype}"
    given = {"shape": shape, "dtype": dtype, "device": "cpu"}
    who = Contestant(name, "benchmarks.contestants.ours:train", given)
    return Work(who, {"tokens": Measure(name, training_products(TRAINING[shape], dtype, "cpu"))})


def decoding(shape: str, precision: str, models: str, *, prompt: bool = False) -> Work:
    """New tokens of one sequence, not compiled; with `prompt`, also the rate of its prefill."""
    name = f"decode {shape}, {precision}"
    own = {"precision": precision, "compiled": False, "device": "cpu"}
    given = asked(shape, 1, NEW_TOKENS, models) | own
    sizes = DECODING[shape]
    measures: dict[str, Measure] = {}
    if prompt:
        limit = prompt_products(sizes, precision, 1, "cpu")
        measures["prefill"] = Measure(f"prompt of {PROMPT_TOKENS}, {shape}, {precision}", limit)
    limit = weights_read(sizes, precision, 1, "cpu")
    measures["decode"] = Measure(name, limit)
    return Work(Contestant(name, OURS, given), measures)
