"""The command line that every benchmark has, and its output: a table, JSON, and a stored result."""

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
"""The exit code of a program that Ctrl-C ended."""
OURS = "Workhorse"
"""How the names of our own rows begin."""

Cases = Callable[[argparse.Namespace], Iterable[Case]]


def at_least_one(text: str) -> int:
    """A number of rounds or threads."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1; give one")
    return int(text)


def checkout_of_nanogpt(text: str) -> Path:
    """Where nanoGPT is."""
    if not (Path(text) / "model.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is no checkout of nanoGPT: it has no model.py")
    return Path(text)


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    made = argparse.ArgumentParser(description=description.partition("\n")[0])
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    made.add_argument("--save", action="store_true", help="keep the result in results/")
    made.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of {ROUNDS}")
    made.add_argument("--rounds", type=at_least_one, help="another number of rounds")
    made.add_argument("--threads", type=at_least_one, default=default_threads())
    made.add_argument("--only", nargs="+", metavar="NAME", help="these contestants alone")
    made.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="each of our rows beside the same of another checkout, and no peers",
    )
    return made


def with_device(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A further option, of benchmarks that compute."""
    made.add_argument("--device", default="cpu", help="cpu or cuda")
    return made


def with_models(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A further option, of benchmarks that need files."""
    made.add_argument(
        "--models",
        type=lambda path: Path(path).resolve(),
        default="runs/benchmarks",
        help="where models and texts are kept",
    )
    return made


def main(name: str, cases: Cases, options: argparse.Namespace) -> None:
    """Run cases one after the other; print each as it ends, and each round to stderr.

    Ctrl-C and SIGTERM end it with the table of the rounds so far, and the exit code 130.
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
        sys.exit("--save keeps the rows of RESULTS.md, which have no other checkout; leave it out")
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
        sys.exit("no contestant is left; leave out --only, or --against where no row is ours")
    if options.json:
        print(json.dumps(results))


def _report(name: str, line: str) -> None:
    print(name, line, file=sys.stderr, flush=True)


def chosen(
    cases: Iterable[Case], only: Sequence[str] | None, against: Path | None
) -> Iterator[Case]:
    """The cases with the contestants that were asked for.

    Args:
        cases: of the benchmark.
        only: names of contestants; None: all.
        against: a checkout: a case for each contestant of ours, with the same of that checkout.
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
    """How to get a result again; paths of this machine are left out."""
    shown = ["PATH" if Path(word).exists() else word for word in arguments if word != "--save"]
    return " ".join([f"python -m benchmarks.{name}", *shown])


def store(name: str, results: Sequence[dict[str, object]]) -> None:
    """Put results in the place of earlier ones of the same case."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    kept = {one["case"]: one for one in (json.loads(path.read_text()) if path.exists() else [])}
    kept |= {one["case"]: one for one in results}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(list(kept.values()), indent=1) + "\n")
    temporary.replace(path)


def table(name: str, outcome: Outcome) -> str:
    """What came out of a case, for a terminal."""
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
