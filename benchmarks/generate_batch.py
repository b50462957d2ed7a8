"""Decoding several sequences at once: new tokens per second of the whole batch, beside peers.

    python -m benchmarks.generate_batch [--batches 1 8 32] [--precisions bfloat16 int8]

Each row has a different prompt of 128 random tokens and gets 64 new ones. All but the first are
timed. The limit is reading the weights once per step, for any batch size. A large batch is limited
by its arithmetic long before that.
"""

import argparse
from collections.abc import Iterator

from benchmarks.contestants.generating import case
from benchmarks.harness.command import main, parser, with_device, with_models
from benchmarks.harness.contest import Case
from benchmarks.harness.shapes import DECODING, NEW_TOKENS, PRECISIONS


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """One case for each batch and precision."""
    for precision in options.precisions:
        for batch in options.batches:
            yield case(
                DECODING[options.shape],
                precision,
                measure="decode",
                batch=batch,
                new_tokens=NEW_TOKENS,
                device=options.device,
                models=str(options.models),
            )


def options() -> argparse.ArgumentParser:
    """The command-line parser."""
    made = with_models(with_device(parser(__doc__ or "")))
    made.add_argument("--shape", choices=DECODING, default="160m")
    made.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    made.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bfloat16"])
    return made


if __name__ == "__main__":
    main("generate_batch", cases, options().parse_args())
