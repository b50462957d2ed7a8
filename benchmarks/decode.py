"""Decoding one sequence: new tokens per second beside peers, and share of memory bandwidth.

    python -m benchmarks.decode [--shapes 160m 1b] [--precisions float32 bfloat16 int8 int4]

A prompt of 128 random tokens, then 64 new ones, greedy. The prefill gives the first new token; the
others are timed. All contestants have the same random weights. A row of 8 or 4 bits is compared
with llama.cpp's type of equal size, including scales. The limit is reading the weights of all
matmuls once per token. What attention reads from its cache is not counted.
"""

import argparse
from collections.abc import Iterator

from benchmarks.contestants.generating import case
from benchmarks.harness.command import main, parser, with_device, with_models
from benchmarks.harness.contest import Case
from benchmarks.harness.shapes import DECODING, NEW_TOKENS, PRECISIONS

TOO_LARGE = {("1b", "float32")}
"""Skipped unless requested by name: 4.4 GB per contestant, and an unusual way to decode."""


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """One case for each shape and precision."""
    for shape in options.shapes:
        for precision in options.precisions or PRECISIONS:
            if options.precisions or (shape, precision) not in TOO_LARGE:
                yield case(
                    DECODING[shape],
                    precision,
                    measure="decode",
                    batch=1,
                    new_tokens=NEW_TOKENS,
                    device=options.device,
                    models=str(options.models),
                )


def options() -> argparse.ArgumentParser:
    """The command-line parser."""
    made = with_models(with_device(parser(__doc__ or "")))
    made.add_argument("--shapes", nargs="+", choices=DECODING, default=list(DECODING))
    made.add_argument("--precisions", nargs="+", choices=PRECISIONS)
    return made


if __name__ == "__main__":
    main("decode", cases, options().parse_args())
