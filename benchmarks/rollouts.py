"""Rollouts and the steps that learn from them, exact and not: tokens per second.

    python -m benchmarks.rollouts [--shapes 25m 160m] [--dtypes float32 bfloat16] [--rows 1 8 32]

A rollout completes prompts of 64 random tokens with 64 sampled ones. A step trains on whole rows.
`generate` completes the same prompts with the engine and its usual log-probabilities.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.command import main, parser, with_models
from benchmarks.harness.contest import Case
from benchmarks.harness.shapes import DTYPES, TUNING
from benchmarks.harness.worker import Contestant

WORK = ("complete", "step")


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """One case for each shape, dtype, number of rows and kind of work."""
    for shape in options.shapes:
        for dtype in options.dtypes:
            for rows in options.rows:
                for work in WORK:
                    yield _case(work, shape, dtype, rows, str(options.models))


def _case(work: str, shape: str, dtype: str, rows: int, models: str) -> Case:
    same: dict[str, Any] = {"shape": shape, "dtype": dtype, "rows": rows, "models": models}
    build = f"benchmarks.contestants.rollouts:{work}"
    contestants = [
        Contestant("exact", build, same | {"exact": True}),
        Contestant("not exact", build, same | {"exact": False}),
    ]
    if work == "complete":
        contestants.append(Contestant("generate", "benchmarks.contestants.rollouts:generate", same))
    return Case(f"{shape} {dtype} {rows} rows {work}", "tokens", "tokens/s", tuple(contestants))


def options() -> argparse.ArgumentParser:
    """The command-line parser."""
    made = with_models(parser(__doc__ or ""))
    made.add_argument("--shapes", nargs="+", choices=TUNING, default=list(TUNING))
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    made.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    return made


if __name__ == "__main__":
    main("rollouts", cases, options().parse_args())
