"""Our own work by itself, without peers: what `busy` and `this_machine` measure."""

from typing import NamedTuple

from benchmarks.harness.shapes import NEW_TOKENS, PROMPT_TOKENS, TRAINING
from benchmarks.harness.worker import Contestant

TOKENS = "tokens/s"


class Measure(NamedTuple):
    """A figure of a round."""

    name: str
    """Of its row in a table: for a rate of ours, as in docs/performance.md."""
    unit: str


class Work(NamedTuple):
    """Who does it, and the measures of a round."""

    contestant: Contestant
    measures: dict[str, Measure]


def training(shape: str, dtype: str) -> Work:
    """Steps of training."""
    name = f"train {shape}, {dtype}"
    given = {"shape": shape, "dtype": dtype, "device": "cpu"}
    who = Contestant(name, "benchmarks.contestants.ours:train", given)
    return Work(who, {"tokens": Measure(name, TOKENS)})


def decoding(shape: str, precision: str, models: str, *, prompt: bool = False) -> Work:
    """New tokens of one text, not compiled; with `prompt`, also the rate of reading it."""
    name = f"decode {shape}, {precision}"
    given = {
        "shape": shape,
        "precision": precision,
        "batch": 1,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "compiled": False,
        "device": "cpu",
        "models": models,
    }
    read = Measure(f"prompt of {PROMPT_TOKENS}, {shape}, {precision}", TOKENS)
    measures = {"prefill": read} if prompt else {}
    measures["decode"] = Measure(name, TOKENS)
    return Work(Contestant(name, "benchmarks.contestants.ours:generate", given), measures)


def reading() -> Work:
    """Memory, as fast as it can be read."""
    memory = Contestant("memory", "benchmarks.harness.limits:memory", {"device": "cpu"})
    return Work(memory, {"gbytes": Measure("limit: memory", "GB/s")})


def products(shape: str, dtype: str) -> Work:
    """The matrix products of a training step, as fast as PyTorch computes them."""
    sizes, name = TRAINING[shape], f"limit: products, {dtype}"
    given = {
        "shapes": sizes.products,
        "tokens": sizes.batch * sizes.context,
        "dtype": dtype,
        "device": "cpu",
        "backward": True,
    }
    who = Contestant(name, "benchmarks.harness.limits:products", given)
    return Work(who, {"gflops": Measure(name, "GFLOP/s")})
