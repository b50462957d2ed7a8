"""What this machine does, in two minutes: its own row beside those of docs/performance.md.

    python -m benchmarks.row [--rounds 3]

Ours alone, as the command line runs it, and what the machine can do at most. A lower instruction
set is measured with `WORKHORSE_NATIVE`, `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA`.
"""

import argparse
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.command import with_models
from benchmarks.machine import default_threads, describe
from benchmarks.worker import Worker
from benchmarks.works import Work, decoding, products, reading, training
from workhorse.waiting import share_cores

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
HEADING = "| machine |"
"""How the table of the page begins."""
DTYPES = ("float32", "bfloat16")


def works(models: str) -> Iterator[Work]:
    """The columns of the table, one or two for each."""
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


def known() -> list[str]:
    """The table of the page, line by line; none where there is no page."""
    if not PAGE.exists():
        return []
    found = re.search(rf"^{re.escape(HEADING)}.*(?:\n\|.*)*", PAGE.read_text(), re.MULTILINE)
    return found[0].splitlines() if found else []


def main() -> None:
    """Measure, and print the table with a row more."""
    options = with_models(argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]))
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    share_cores()
    threads = default_threads()
    about = describe(threads, "cpu")
    heads, figures = list[str](), list[str]()
    for work in works(str(given.models)):
        print(f"{work.contestant.name} …", end=" ", flush=True)
        found = [f"{figure:,.0f}" for figure in measured(work, given.rounds, threads)]
        print(*found, sep=", ", flush=True)
        heads += work.measures.values()
        figures += found
    table = known() or [f"{HEADING} {' | '.join(heads)} |", "|---" + "|--:" * len(heads) + "|"]
    print("\n".join(table))
    name = f"this one: {about['processor']}, {about['cores'].partition(',')[0]}"
    print(f"| {name}, {about['instructions']} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
