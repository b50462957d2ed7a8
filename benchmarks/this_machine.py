"""What this machine does, in two minutes: a column like those of docs/performance.md.

    python -m benchmarks.this_machine [--rounds 3]

Ours alone, as the command line runs it, and what the machine can do at most. A lower instruction
set is measured with `WORKHORSE_NATIVE`, `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA`.
"""

import argparse
import statistics
from collections.abc import Iterator

from benchmarks.contestants.works import Work, decoding, products, reading, training
from benchmarks.harness.command import at_least_one, with_models
from benchmarks.harness.machine import default_threads, describe
from benchmarks.harness.worker import Worker
from workhorse.waiting import share_cores

DTYPES = ("float32", "bfloat16")


def works(models: str) -> Iterator[Work]:
    """The rows of the table, one or two for each."""
    yield reading()
    yield from (products("baby", dtype) for dtype in DTYPES)
    yield from (training(shape, dtype) for shape in ("tiny", "baby") for dtype in DTYPES)
    yield decoding("160m", "bfloat16", models, prompt=True)
    yield from (decoding("160m", precision, models) for precision in ("int8", "int4"))


def measured(work: Work, rounds: int, threads: int) -> list[float]:
    """The median of each of its measures."""
    worker = Worker(work.contestant, threads)
    try:
        found = [worker.round() for _ in range(rounds)]
    finally:
        worker.close()
    return [statistics.median(one[measure] for one in found) for measure in work.measures]


def main() -> None:
    """Measure, and print the table."""
    options = with_models(argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]))
    options.add_argument("--rounds", type=at_least_one, default=3)
    given = options.parse_args()
    share_cores()
    threads = default_threads()
    about = describe(threads, "cpu")
    print(f"| | {about['processor']}, {about['cores']}, {about['instructions']} |\n|---|--:|")
    for work in works(str(given.models)):
        figures = measured(work, given.rounds, threads)
        for measure, figure in zip(work.measures.values(), figures, strict=True):
            print(f"| {measure.name} | {figure:,.0f} {measure.unit} |", flush=True)


if __name__ == "__main__":
    main()
