"""Training and decoding beside programs that keep every core busy: what share of the speed is left.

    python -m benchmarks.busy [--plain] [--rounds 5]

Each program has as many threads as there are cores, so that beside one of them half of the machine
is left, and beside two a third. Rounds go alone, beside one, beside two, alone … `--plain` leaves
it to OpenMP how threads wait; see `workhorse.waiting`.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.machine import default_threads, describe
from benchmarks.worker import Contestant, Worker
from workhorse.waiting import SETTINGS, share_cores

LOADS = (0, 1, 2)
SPIN = "while True: pass"
MODELS = Path("runs/benchmarks").resolve()


def works() -> dict[str, tuple[str, Contestant]]:
    """By name: the measure of a round, and who takes it."""
    made: dict[str, tuple[str, Contestant]] = {}
    for shape, dtype in (("tiny", "float32"), ("tiny", "bfloat16"), ("baby", "bfloat16")):
        name = f"train {shape} {dtype}"
        given = {"shape": shape, "dtype": dtype, "device": "cpu"}
        made[name] = "tokens", Contestant(name, "benchmarks.ours:train", given)
    for precision in ("bfloat16", "int4"):
        name = f"decode 160m {precision}"
        given = {
            "shape": "160m",
            "precision": precision,
            "batch": 1,
            "prompt_tokens": 128,
            "new_tokens": 64,
            "compiled": False,
            "device": "cpu",
            "models": str(MODELS),
        }
        made[name] = "decode", Contestant(name, "benchmarks.ours:generate", given)
    return made


@contextmanager
def beside(programs: int) -> Generator[None]:
    """While so many programs keep every core busy, a process for each core."""
    command = [sys.executable, "-c", SPIN]
    started = [subprocess.Popen(command) for _ in range(programs * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def main() -> None:
    """Measure each, and print a row."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--plain", action="store_true", help="threads wait as OpenMP has them")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--only", nargs="+", metavar="WORK", help="these alone")
    given = options.parse_args()
    if not given.plain:
        share_cores()
    threads = default_threads()
    print(", ".join(describe(threads, "cpu").values()))
    print(", ".join(f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ))
    print("\n| | alone | beside one | | beside two | |\n|---|--:|--:|--:|--:|--:|")
    for name, (measure, contestant) in works().items():
        if given.only and name not in given.only:
            continue
        worker = Worker(contestant, threads)
        found: dict[int, list[float]] = {load: [] for load in LOADS}
        for _ in range(given.rounds):
            for load in LOADS:
                with beside(load):
                    found[load].append(worker.round()[measure])
        worker.close()
        alone, *others = (statistics.median(found[load]) for load in LOADS)
        shares = " | ".join(f"{one:,.0f} | {one / alone:.0%}" for one in others)
        print(f"| {name} | {alone:,.0f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
