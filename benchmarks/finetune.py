"""Steps of fine-tuning: tokens per second and peak memory beside TRL with PEFT.

    python -m benchmarks.finetune [--shapes 25m 160m] [--dtypes float32 bfloat16]
                                  [--methods sft lora qlora dpo]

All contestants have the same weights, rows of 512 tokens without padding, AdamW and clipping. DPO
uses reference log-probabilities that are computed before. TRL trains in its own loop, with
checkpointing and dropout switched off, and with autocast in bfloat16. It has no 4-bit weights on a
CPU, so `qlora` is compared with its `lora`.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.command import main, parser, with_models
from benchmarks.harness.contest import Case
from benchmarks.harness.shapes import DTYPES, TUNING
from benchmarks.harness.worker import Contestant

METHODS = ("sft", "lora", "qlora", "dpo")
BATCHES = {"25m": 8, "160m": 4}
"""Rows in a step, by shape."""


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """One case for each shape, dtype and method."""
    for shape in options.shapes:
        for dtype in options.dtypes:
            for method in options.methods:
                yield _case(shape, dtype, method, str(options.models))


def _case(shape: str, dtype: str, method: str, models: str) -> Case:
    same: dict[str, Any] = {
        "shape": shape,
        "dtype": dtype,
        "method": method,
        "rows": BATCHES[shape],
        "models": models,
    }
    theirs = same | {"method": "lora" if method == "qlora" else method}
    contestants = (
        Contestant("Workhorse", "benchmarks.contestants.tuning:train", same),
        Contestant("TRL, PEFT", "benchmarks.peers.trl:train", theirs),
    )
    return Case(f"{shape} {dtype} {method}", "tokens", "tokens/s", contestants)


def options() -> argparse.ArgumentParser:
    """The command-line parser."""
    made = with_models(parser(__doc__ or ""))
    made.add_argument("--shapes", nargs="+", choices=TUNING, default=list(TUNING))
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    made.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    return made


if __name__ == "__main__":
    main("finetune", cases, options().parse_args())
