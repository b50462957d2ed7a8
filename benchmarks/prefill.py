"""Prefill: tokens per second of a prompt beside peers, and share of the matmul rate.

    python -m benchmarks.prefill [--shapes 160m 1b] [--precisions bfloat16]

The time from 128 random tokens to the first new one. The limit is the rate of the layers' matmuls
for the same number of tokens.
"""

import argparse
from collections.abc import Iterator

from benchmarks.contestants.generating import case
from benchmarks.harness.command import main, parser, with_device, with_models
from benchmarks.harness.contest import Case
from benchmarks.harness.shapes import DECODING, PRECISIONS


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """One case for each shape and precision."""
    for shape in options.shapes:
        for precision in options.precisions:
            yield case(
                DECODING[shape],
                precision,
                measure="prefill",
                batch=1,
                new_tokens=1,
                device=options.device,
                models=str(options.models),
            )


def options() -> argparse.ArgumentParser:
    """The command-line parser."""
    made = with_models(with_device(parser(__doc__ or "")))
    made.add_argument("--shapes", nargs="+", choices=DECODING, default=list(DECODING))
    made.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bfloat16"])
    return made


if __name__ == "__main__":
    main("prefill", cases, options().parse_args())
