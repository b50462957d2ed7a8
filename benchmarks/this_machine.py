"""Speed of this machine in two minutes: some rows of docs/performance.md, none compiled.

    python -m benchmarks.this_machine [--rounds 3]

Only Workhorse runs, as the command line runs it. Each figure is also given as a share of the
machine's limit: the rate of a step's matmuls, or of reading memory. To measure a lower instruction
set, use `WORKHORSE_NATIVE`, `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA`.
"""

import argparse
import statistics
from collections.abc import Iterator

from benchmarks.contestants.works import Measure, Work, decoding, training
from benchmarks.harness.command import at_least_one, with_models
from benchmarks.harness.machine import default_threads, describe
from benchmarks.harness.shapes import DTYPES
from benchmarks.harness.worker import Contestant, Worker
from workhorse.devices.waiting import share_cores


def works(models: str) -> Iterator[Work]:
    """The workloads; each makes one or two rows of the table."""
    yield from (training(shape, dtype) for shape in ("tiny", "baby") for dtype in DTYPES)
    yield decoding("160m", "bfloat16", models, prompt=True)
    yield from (decoding("160m", precision, models) for precision in ("int8", "int4"))


class Measured:
    """Medians of contestants; each contestant is measured once and by itself.

    Args:
        rounds: number of rounds of each contestant.
        threads: number of threads of each contestant.
    """

    def __init__(self, rounds: int, threads: int) -> None:
        self._rounds, self._threads = rounds, threads
        self._known: dict[str, dict[str, float]] = {}

    def __call__(self, contestant: Contestant) -> dict[str, float]:
        name = repr(contestant)
        if name not in self._known:
            worker = Worker(contestant, self._threads)
            try:
                rounds = [worker.round() for _ in range(self._rounds)]
            finally:
                worker.close()
            self._known[name] = {
                measure: statistics.median(one[measure] for one in rounds) for measure in rounds[0]
            }
        return self._known[name]


def row(measure: Measure, rate: float, limit: float) -> str:
    """A row of the table: `rate` in tokens per second, `limit` in its own unit."""
    share = rate * measure.limit.work / limit
    of = f"{limit:,.0f} {measure.limit.unit} of {measure.limit.name}"
    return f"| {measure.name} | {rate:,.0f} tokens/s, {share:.0%} | {of} |"


def main() -> None:
    """Measure, and print the table."""
    options = with_models(argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]))
    options.add_argument("--rounds", type=at_least_one, default=3)
    given = options.parse_args()
    share_cores()
    threads = default_threads()
    about = describe(threads, "cpu")
    here = f"{about['processor']}, {about['cores']}, {about['instructions']}"
    print(f"| | {here} | the percentage is of |\n|---|--:|---|")
    measured = Measured(given.rounds, threads)
    for contestant, measures in works(str(given.models)):
        rates = measured(contestant)
        for name, measure in measures.items():
            limit = measured(measure.limit.contestant)[measure.limit.measure]
            print(row(measure, rates[name], limit), flush=True)


if __name__ == "__main__":
    main()
