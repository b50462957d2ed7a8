"""Speed of training and decoding while other programs keep every core busy.

    python -m benchmarks.busy [--plain] [--rounds 5]

Each program is one busy process per core. With one program, half of the machine is left for the
work; with two, a third. The rounds alternate between no program, one and two. The last columns are
two processes of the same work at once. `--plain` leaves the way in which threads wait to OpenMP.
`GOMP_SPINCOUNT` in the environment sets how long they spin; see `workhorse.devices.waiting`.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from benchmarks.contestants.works import Work, decoding, training
from benchmarks.harness.command import at_least_one, with_models
from benchmarks.harness.machine import default_threads, describe
from benchmarks.harness.worker import Contestant, Worker
from workhorse.devices.waiting import SETTINGS, share_cores

LOADS = (0, 1, 2)
SPIN = "from workhorse.devices.waiting import run_in_slices\nrun_in_slices(0)\nwhile True: pass"


def works(models: str) -> list[Work]:
    """The workloads to measure."""
    trained = [("tiny", "float32"), ("tiny", "bfloat16"), ("baby", "bfloat16")]
    decoded = ("bfloat16", "int4")
    return [
        *(training(shape, dtype) for shape, dtype in trained),
        *(decoding("160m", precision, models) for precision in decoded),
    ]


@contextmanager
def beside(programs: int) -> Generator[None]:
    """Run programs in the background; each keeps every core busy with one process per core."""
    command = [sys.executable, "-c", SPIN]
    started = [subprocess.Popen(command) for _ in range(programs * default_threads())]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def two_at_once(contestant: Contestant, measure: str, rounds: int, threads: int) -> float:
    """The median over both processes, each with all threads."""

    def take(worker: Worker) -> list[float]:
        return [worker.round()[measure] for _ in range(rounds)]

    workers = [Worker(contestant, threads) for _ in range(2)]
    with ThreadPoolExecutor(len(workers)) as pool:
        found = [one for taken in pool.map(take, workers) for one in taken]
    for worker in workers:
        worker.close()
    return statistics.median(found)


def main() -> None:
    """Measure each workload, and print a row for it."""
    options = with_models(argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]))
    options.add_argument("--plain", action="store_true", help="threads wait as OpenMP decides")
    options.add_argument("--rounds", type=at_least_one, default=5)
    options.add_argument("--only", nargs="+", metavar="WORK", help="only these workloads")
    given = options.parse_args()
    every = works(str(given.models))
    names = [one.contestant.name for one in every]
    if unknown := [name for name in given.only or names if name not in names]:
        options.error(f"unknown: {unknown[0]}; there are: {'; '.join(names)}")
    if not given.plain:
        share_cores()
    threads = default_threads()
    print(", ".join(describe(threads, "cpu").values()))
    print(", ".join(f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ))
    print("\n| | alone | beside one | | beside two | | two at once, each | |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for contestant, measures in every:
        if given.only and contestant.name not in given.only:
            continue
        (measure,) = measures
        worker = Worker(contestant, threads)
        found: dict[int, list[float]] = {load: [] for load in LOADS}
        for _ in range(given.rounds):
            for load in LOADS:
                with beside(load):
                    found[load].append(worker.round()[measure])
        worker.close()
        alone, *others = (statistics.median(found[load]) for load in LOADS)
        others.append(two_at_once(contestant, measure, given.rounds, threads))
        shares = " | ".join(f"{one:,.0f} | {one / alone:.0%}" for one in others)
        print(f"| {contestant.name} | {alone:,.0f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
