"""The command line of every benchmark, and its output: a table, JSON, and a stored result."""

import argparse
import datetime
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from benchmarks.harness.contest import Case, Entry, Outcome, rounded, run
from benchmarks.harness.machine import default_threads, describe, versions

RESULTS = Path(__file__).parents[1] / "results"
ROUNDS, QUICK_ROUNDS = 9, 3
MIB = 1 << 20
INTERRUPTED = 130
"""The exit code after Ctrl-C."""
OURS = "Workhorse"
"""Prefix of the names of our own rows."""

Cases = Callable[[argparse.Namespace], Iterable[Case]]


def at_least_one(text: str) -> int:
    """Parse a number of rounds or threads."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1; give one")
    return int(text)


def checkout_of_nanogpt(text: str) -> Path:
    """Parse the path of a nanoGPT checkout."""
    if not (Path(text) / "model.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a nanoGPT checkout: it has no model.py")
    return Path(text)


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    made = argparse.ArgumentParser(description=description.partition("\n")[0])
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    made.add_argument("--save", action="store_true", help="store the result in results/")
    made.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of {ROUNDS}")
    made.add_argument("--rounds", type=at_least_one, help="number of rounds")
    made.add_argument("--threads", type=at_least_one, default=default_threads())
    made.add_argument("--only", nargs="+", metavar="NAME", help="only these contestants")
    made.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="compare each of our rows with another checkout, without peers",
    )
    return made


def with_device(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the option `--device`."""
    made.add_argument("--device", default="cpu", help="cpu or cuda")
    return made


def with_models(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the option `--models`."""
    made.add_argument(
        "--models",
        type=lambda path: Path(path).resolve(),
        default="runs/benchmarks",
        help="folder of stored models and corpora",
    )
    return made


def main(name: str, cases: Cases, options: argparse.Namespace) -> None:
    """Run cases in turn; print each case as it ends, and each round to stderr.

    After Ctrl-C or SIGTERM, print the table of the rounds so far and exit with code 130.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    device = getattr(options, "device", "cpu")
    about = {
        "command": command_line(name, sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": describe(options.threads, device),
        "versions": versions(),
    }
    if options.against and options.save:
        sys.exit("--save stores the rows of RESULTS.md, and cannot be used with --against; omit it")
    if options.against and not (options.against / "benchmarks" / "harness" / "worker.py").is_file():
        sys.exit(f"--against {options.against} is not a checkout of this project; give its folder")
    results = []
    for case in chosen(cases(options), options.only, options.against):
        outcome = run(case, rounds, options.threads, partial(_report, name))
        print(table(name, outcome), file=sys.stderr if options.json else sys.stdout, flush=True)
        if outcome.interrupted:
            sys.exit(INTERRUPTED)
        results.append({**asdict(outcome), **about})
        if options.save:
            store(name, results)
    if not results:
        sys.exit("no contestant is left; omit --only, or --against for cases without our rows")
    if options.json:
        print(json.dumps(results))


def _report(name: str, line: str) -> None:
    print(name, line, file=sys.stderr, flush=True)


def chosen(
    cases: Iterable[Case], only: Sequence[str] | None, against: Path | None
) -> Iterator[Case]:
    """The cases with the requested contestants.

    Args:
        cases: the cases of the benchmark.
        only: names of contestants; None for all.
        against: a checkout; each contestant of ours becomes a case with the one there.
    """
    for case in cases:
        kept = [one for one in case.contestants if not only or one.name in only]
        if against is None:
            if kept:
                yield replace(case, contestants=tuple(kept))
            continue
        for one in kept:
            if one.name.startswith(OURS):
                other = replace(one, name="the other checkout", checkout=against.resolve())
                name = f"{case.name}: {one.name}"
                yield replace(case, name=name, contestants=(one, other), limit=None, skipped=())


def command_line(name: str, arguments: Sequence[str]) -> str:
    """The command that reproduces a result; paths of this machine are replaced by PATH."""
    shown = ["PATH" if Path(word).exists() else word for word in arguments if word != "--save"]
    return " ".join([f"python -m benchmarks.{name}", *shown])


def store(name: str, results: Sequence[dict[str, object]]) -> None:
    """Store results; they replace earlier ones of the same case."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    kept = {one["case"]: one for one in (json.loads(path.read_text()) if path.exists() else [])}
    kept |= {one["case"]: one for one in results}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(list(kept.values()), indent=1) + "\n")
    temporary.replace(path)


def table(name: str, outcome: Outcome) -> str:
    """The result of a case as text for a terminal."""
    bound = ""
    if outcome.limit_median is not None:
        bound = f", {outcome.limit} {outcome.limit_median:,.1f} {outcome.limit_unit}"
    lines = [f"{name} {outcome.case} ({outcome.rounds} rounds{bound})"]
    lines += [f"  {_row(entry, outcome)}" for entry in outcome.entries]
    lines += [f"  - {line}" for line in outcome.missing]
    return "\n".join(lines)


def _row(entry: Entry, outcome: Outcome) -> str:
    words = [f"{entry.name:22}{rounded(entry.median):>10} {outcome.unit}"]
    if entry.achieved is not None:
        words.append(f"{entry.achieved:8,.1f} {outcome.limit_unit}")
    if entry.of_limit is not None:
        words.append(f"{entry.of_limit:4.0%} of the limit")
    if entry.peak_bytes is not None:
        words.append(f"peak {entry.peak_bytes / MIB:6,.0f} MiB")
    words.append(f"ready after {entry.build_seconds:5.1f} s")
    if entry.ratio is not None:
        words.append(f"ratio {entry.ratio:.2f}")
    return "  ".join(words)
