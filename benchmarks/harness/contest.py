"""One case of a benchmark: contestants and the machine's limit, run in turn, and the outcome."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from benchmarks.harness.timing import ratio, turns
from benchmarks.harness.worker import Contestant, Measures, MissingError, Worker

IDLE_CORES = 0.05
"""Maximum cores that a contestant may use between its rounds without disturbing the others."""


@dataclass(frozen=True)
class Limit:
    """A rate that nothing on the machine exceeds, measured in the same rounds."""

    name: str
    unit: str
    contestant: Contestant
    measure: str
    """Name of the contestant's measure."""
    work: float
    """The limit's units that a contestant uses for one of its own, such as GFLOP per token."""


@dataclass(frozen=True)
class Case:
    """Contestants that do the same work.

    Attributes:
        name: the name of the case.
        measure: the measure that is compared.
        unit: the unit of the measure. Seconds are better when lower, all others when higher.
        contestants: the contestants, ours first.
        limit: the limit; None if there is none.
        fresh: True to start every round in a new process.
        peaks: True if the peak memory of the processes is meaningful.
        skipped: names of contestants that do not take part, and why.
    """

    name: str
    measure: str
    unit: str
    contestants: tuple[Contestant, ...]
    limit: Limit | None = None
    fresh: bool = False
    peaks: bool = True
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """The result of one contestant, in the unit of its `Outcome`."""

    name: str
    median: float
    values: list[float]
    """One value per round."""
    ratio: float | None
    """Speed of the first contestant divided by this one's, by round; None for the first contestant,
    and if the first is missing."""
    achieved: float | None
    """The rate in the unit of the limit."""
    of_limit: float | None
    """The rate as a fraction of the limit, by round."""
    peak_bytes: int | None
    """Peak resident memory of its process."""
    build_seconds: float
    """Seconds from the start of its process to its first round, including compilation."""
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a case."""

    case: str
    unit: str
    rounds: int
    entries: list[Entry]
    limit: str = ""
    limit_unit: str = ""
    limit_median: float | None = None
    missing: list[str] = field(default_factory=list)
    interrupted: bool = False
    """True if only some of the rounds were completed."""


def run(
    case: Case, rounds: int, threads: int, report: Callable[[str], object] = lambda line: None
) -> Outcome:
    """Build the contestants that can be built, run the rounds in turn, and compare.

    After a KeyboardInterrupt the outcome has the rounds that all contestants completed. If there is
    none, it has the contestants that completed the first round.

    Args:
        case: the case.
        rounds: number of rounds of each contestant.
        threads: number of threads of each contestant's process.
        report: receives a line when a contestant is built, and after each of its rounds.
    """
    missing = list(case.skipped)
    results: dict[str, list[Measures]] = {}
    takes: dict[str, Callable[[], Measures]] = {}
    workers: dict[str, list[Worker]] = {}
    interrupted = True
    with contextlib.suppress(KeyboardInterrupt), ExitStack() as stack:
        everyone = [*case.contestants, *([case.limit.contestant] if case.limit else [])]
        for contestant in everyone:
            seen: list[Worker] = []
            try:
                take = stack.enter_context(_rounds_of(contestant, threads, case.fresh, seen))
            except MissingError as error:
                missing.append(f"{contestant.name}: {error}")
                continue
            except RuntimeError as error:  # the others' figures are valid without it
                missing.append(f"{contestant.name} failed: {str(error).splitlines()[-1]}")
                continue
            takes[contestant.name], workers[contestant.name] = take, seen
            report(f"{case.name}: {contestant.name} is ready")
        for name, number, measures in turns(takes, rounds):
            results.setdefault(name, []).append(measures)
            shown = _shown(case, name, measures)
            report(f"{case.name}: {name}, round {number} of {rounds}: {shown}")
        interrupted = False
    if interrupted:
        everyones = min(len(results.get(name, ())) for name in takes) if results else 0
        results = {name: taken[: everyones or 1] for name, taken in results.items()}
        missing.append(f"interrupted in round {everyones + 1} of {rounds}")
    for name, measures in results.items():
        busy = max(measure["idle"] for measure in measures)
        if len(results) > 1 and busy > IDLE_CORES:
            missing.append(f"{name} used {busy:.2f} cores while others ran; take ratios with care")
    return replace(compare(case, results, workers, missing), interrupted=interrupted)


def _shown(case: Case, name: str, measures: Measures) -> str:
    limit = case.limit
    if limit and name == limit.contestant.name:
        return f"{rounded(measures[limit.measure])} {limit.unit}"
    return f"{rounded(measures[case.measure])} {case.unit}"


def rounded(value: float) -> str:
    """A measure with three decimals below 1, two below 100, else none."""
    digits = 3 if value < 1 else 2 if value < 100 else 0  # noqa: PLR2004
    return f"{value:,.{digits}f}"


@contextmanager
def _rounds_of(
    contestant: Contestant, threads: int, fresh: bool, seen: list[Worker]
) -> Iterator[Callable[[], Measures]]:
    """A function that runs a contestant's rounds, in one process or in a new one per round."""
    worker = Worker(contestant, threads)
    if not fresh:
        seen.append(worker)
        try:
            yield worker.round
        finally:
            worker.close()
        return
    worker.close()  # it was started only to see whether it can take part

    def take() -> Measures:
        worker = Worker(contestant, threads)
        seen.append(worker)
        try:
            return worker.round()
        finally:
            worker.close()

    yield take


def compare(
    case: Case,
    results: dict[str, list[Measures]],
    workers: dict[str, list[Worker]],
    missing: Sequence[str],
) -> Outcome:
    """Medians, ratios and fractions of the limit."""
    values = {
        contestant.name: [measures[case.measure] for measures in results[contestant.name]]
        for contestant in case.contestants
        if contestant.name in results
    }
    less_is_better = case.unit == "s"
    bound = None
    if case.limit and case.limit.contestant.name in results:
        bound = [one[case.limit.measure] for one in results[case.limit.contestant.name]]
    first = case.contestants[0].name
    entries = []
    for contestant in case.contestants:
        if contestant.name not in values:
            continue
        own, ours = values[contestant.name], values.get(first)
        quotient = None
        if ours is not None and contestant.name != first:
            quotient = ratio(own, ours) if less_is_better else ratio(ours, own)
        achieved = None
        if case.limit:
            per_second = [1 / one for one in own] if less_is_better else own
            achieved = [one * case.limit.work for one in per_second]
        seen = workers[contestant.name]
        entries.append(
            Entry(
                name=contestant.name,
                median=statistics.median(own),
                values=own,
                ratio=quotient,
                achieved=statistics.median(achieved) if achieved else None,
                of_limit=ratio(achieved, bound) if achieved and bound else None,
                peak_bytes=max(worker.peak_bytes for worker in seen) if case.peaks else None,
                build_seconds=statistics.median(worker.build_seconds for worker in seen),
                note=contestant.note,
            )
        )
    return Outcome(
        case=case.name,
        unit=case.unit,
        rounds=len(next(iter(results.values()), [])),
        entries=entries,
        limit=case.limit.name if case.limit else "",
        limit_unit=case.limit.unit if case.limit else "",
        limit_median=statistics.median(bound) if bound else None,
        missing=list(missing),
    )
