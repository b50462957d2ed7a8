"""Limits of the machine: the rates of matmuls of every shape, and of reading memory.

    python -m benchmarks.roofline [--dtypes float32 bfloat16]

Other benchmarks state figures as fractions of these limits, which they measure in their own rounds.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.contestants.limits import memory, prompt_products, training_products
from benchmarks.harness.command import main, parser, with_device
from benchmarks.harness.contest import Case
from benchmarks.harness.shapes import DECODING, DTYPES, PROMPT_TOKENS, TRAINING
from benchmarks.harness.worker import Contestant


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Memory, then the matmuls of each dtype."""
    device = options.device
    yield _case("memory read", "gbytes", "GB/s", memory(device))
    for dtype in options.dtypes:
        for shape in TRAINING.values():
            limit = training_products(shape, dtype, device)
            yield _case(
                f"{shape.name} {dtype}, training", limit.measure, limit.unit, limit.contestant
            )
        for shape in DECODING.values():
            limit = prompt_products(shape, dtype, 1, device)
            name = f"{shape.name} {dtype}, prompt of {PROMPT_TOKENS}"
            yield _case(name, limit.measure, limit.unit, limit.contestant)


def _case(name: str, measure: str, unit: str, contestant: Contestant) -> Case:
    return Case(name, measure, unit, (replace(contestant, name="PyTorch"),))


def options() -> argparse.ArgumentParser:
    """The command-line parser."""
    made = with_device(parser(__doc__ or ""))
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    return made


if __name__ == "__main__":
    main("roofline", cases, options().parse_args())
