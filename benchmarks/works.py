"""Our own work by itself, without peers: what `busy` and `row` measure."""

from typing import NamedTuple

from benchmarks.shapes import NEW_TOKENS, PROMPT_TOKENS, TRAINING
from benchmarks.worker import Contestant


class Work(NamedTuple):
    """Who does it, and what each measure of a round is, with its unit."""

    contestant: Contestant
    measures: dict[str, str]


def training(shape: str, dtype: str) -> Work:
    """Steps of training."""
    name = f"train {shape} {dtype}"
    given = {"shape": shape, "dtype": dtype, "device": "cpu"}
    return Work(Contestant(name, "benchmarks.ours:train", given), {"tokens": f"{name}, tokens/s"})


def decoding(shape: str, precision: str, models: str, *, prompt: bool = False) -> Work:
    """New tokens of one text, not compiled; with `prompt`, also the rate of reading it."""
    name = f"decode {shape} {precision}"
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
    read = {"prefill": f"read a prompt of {PROMPT_TOKENS}, {shape} {precision}, tokens/s"}
    return Work(
        Contestant(name, "benchmarks.ours:generate", given),
        {**(read if prompt else {}), "decode": f"{name}, tokens/s"},
    )


def reading() -> Work:
    """Memory, as fast as it can be read."""
    memory = Contestant("memory", "benchmarks.limits:memory", {"device": "cpu"})
    return Work(memory, {"gbytes": "memory, GB/s"})


def products(shape: str, dtype: str) -> Work:
    """The matrix products of a training step, as fast as PyTorch computes them."""
    sizes, name = TRAINING[shape], f"products {dtype}"
    given = {
        "shapes": sizes.products,
        "tokens": sizes.batch * sizes.context,
        "dtype": dtype,
        "device": "cpu",
        "backward": True,
    }
    return Work(
        Contestant(name, "benchmarks.limits:products", given), {"gflops": f"{name}, GFLOP/s"}
    )
