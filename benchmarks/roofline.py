"""What the machine can do at most: matrix products of every shape, and reading memory.

    python -m benchmarks.roofline [--dtypes float32 bfloat16]

Everyone's figures elsewhere are fractions of these, measured in the same rounds as theirs.
"""

import argparse
from collections.abc import Iterator

from benchmarks.harness.command import main, parser, with_device
from benchmarks.harness.contest import Case
from benchmarks.harness.shapes import DECODING, PROMPT_TOKENS, TRAINING, Shape
from benchmarks.harness.worker import Contestant

DTYPES = ("float32", "bfloat16")


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The memory, then each type's products."""
    memory = Contestant("PyTorch", "benchmarks.harness.limits:memory", {"device": options.device})
    yield Case("memory read", "gbytes", "GB/s", (memory,))
    for dtype in options.dtypes:
        for shape in TRAINING.values():
            tokens = shape.batch * shape.context
            yield _products(f"{shape.name} {dtype}, training", shape, tokens, dtype, options.device)
        for shape in DECODING.values():
            name = f"{shape.name} {dtype}, prompt of {PROMPT_TOKENS}"
            yield _products(name, shape, PROMPT_TOKENS, dtype, options.device)


def _products(name: str, shape: Shape, tokens: int, dtype: str, device: str) -> Case:
    arguments = {
        "shapes": shape.products,
        "tokens": tokens,
        "dtype": dtype,
        "device": device,
        "backward": not shape.gated,
    }
    products = Contestant("PyTorch", "benchmarks.harness.limits:products", arguments)
    return Case(name, "gflops", "GFLOP/s", (products,))


def options() -> argparse.ArgumentParser:
    """The command line."""
    made = with_device(parser(__doc__ or ""))
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    return made


if __name__ == "__main__":
    main("roofline", cases, options().parse_args())
