"""Passes of invariant decoders (`load(..., exact=True)`) and of usual ones: tokens per second.

    python -m benchmarks.invariant [--shapes 25m 160m] [--precisions float32 bfloat16 int8 int4]

`decode`: steps of 1, 8 and 32 sequences after prompts of 128 random tokens. `prompt`: one pass.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.command import main, parser, with_models
from benchmarks.harness.contest import Case
from benchmarks.harness.shapes import PRECISIONS, TUNING
from benchmarks.harness.worker import Contestant

BUILD = "benchmarks.contestants.invariant:passes"


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """One case for each shape, precision and kind of pass."""
    for shape in options.shapes:
        for precision in options.precisions:
            for sequences in options.sequences:
                work = {"sequences": sequences, "prompt": 128, "steps": 32}
                yield _case(f"decode {sequences}", shape, precision, options, work)
            for prompt in options.prompts:
                work = {"sequences": 1, "prompt": prompt, "steps": 0}
                yield _case(f"prompt {prompt}", shape, precision, options, work)


def _case(
    name: str, shape: str, precision: str, options: argparse.Namespace, work: dict[str, int]
) -> Case:
    models = str(options.models)
    same: dict[str, Any] = {"shape": shape, "precision": precision, "models": models, **work}
    contestants = (
        Contestant("invariant", BUILD, same | {"exact": True}),
        Contestant("usual", BUILD, same | {"exact": False}),
    )
    return Case(f"{shape} {precision} {name}", "tokens", "tokens/s", contestants)


def options() -> argparse.ArgumentParser:
    """The command-line parser."""
    made = with_models(parser(__doc__ or ""))
    made.add_argument("--shapes", nargs="+", choices=TUNING, default=list(TUNING))
    made.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    made.add_argument("--sequences", nargs="*", type=int, default=[1, 8, 32])
    made.add_argument("--prompts", nargs="*", type=int, default=[512, 2000])
    return made


if __name__ == "__main__":
    main("invariant", cases, options().parse_args())
