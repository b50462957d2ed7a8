"""Statistics of the rounds' measures; the values are given, not measured."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.harness.command import chosen, main, parser
from benchmarks.harness.contest import Case, Limit, Outcome, compare, run
from benchmarks.harness.shapes import DECODING, TRAINING
from benchmarks.harness.worker import Contestant, Measures, MissingError, Worker

OURS, PEER = Contestant("Workhorse", "a:b"), Contestant("peer", "a:c")
BOUND = Contestant("memory", "a:d")


class Built:
    """Replaces a worker."""

    def __init__(self, peak_bytes: int, build_seconds: float) -> None:
        self.peak_bytes, self.build_seconds = peak_bytes, build_seconds


def outcome(unit: str, results: dict[str, list[Measures]]) -> Outcome:
    limit = Limit("memory read", "GB/s", BOUND, measure="gbytes", work=0.5)
    case = Case("a case", "value", unit, (OURS, PEER), limit)
    workers = {name: [Built(100, 1.0), Built(300, 3.0)] for name in results}
    return compare(case, results, workers, missing=["somebody: is not installed"])


def rounds(**values: list[float]) -> dict[str, list[Measures]]:
    measures = {"memory": "gbytes"}
    return {
        name: [{measures.get(name, "value"): one} for one in ones] for name, ones in values.items()
    }


def test_more_is_better_and_limits_are_shares():
    found = outcome(
        "tokens/s", rounds(Workhorse=[20.0, 30.0], peer=[10.0, 10.0], memory=[20.0, 20.0])
    )

    ours, peer = found.entries
    assert (ours.median, ours.ratio) == (25.0, None)
    assert peer.ratio == pytest.approx(2.5)  # the median of 2 and 3
    assert ours.achieved == pytest.approx(12.5)  # half a GB per token
    assert ours.of_limit == pytest.approx(0.625)
    assert found.limit_median == 20.0
    assert (ours.peak_bytes, ours.build_seconds) == (300, 2.0)
    assert found.missing == ["somebody: is not installed"]


def test_fewer_seconds_are_better():
    found = outcome("s", rounds(Workhorse=[0.1], peer=[0.4], memory=[10.0]))

    ours, peer = found.entries
    assert peer.ratio == pytest.approx(4.0)
    assert ours.achieved == pytest.approx(5.0)
    assert ours.of_limit == pytest.approx(0.5)


def test_a_peer_that_is_missing_leaves_the_others():
    found = outcome("tokens/s", rounds(Workhorse=[20.0], memory=[20.0]))

    assert [entry.name for entry in found.entries] == ["Workhorse"]


def test_a_case_runs_in_processes_of_its_own():
    python = {"command": [sys.executable, "-c", "pass"]}
    case = Case(
        "start",
        "seconds",
        "s",
        (
            Contestant("here", "benchmarks.start:process", python),
            Contestant("gone", "benchmarks.start:process", {"command": ["no-such-command"]}),
        ),
    )

    found = run(case, rounds=2, threads=1)

    assert [entry.name for entry in found.entries] == ["here"]
    assert len(found.entries[0].values) == 2
    assert found.missing == ["gone: the command no-such-command is not installed"]


FAKES = """
import time
def quick(threads):
    return lambda: {"value": 1234.0}
def slow(threads):
    def take():
        with open("begun", "a") as file:
            print("round", file=file)
        time.sleep(0 if len(open("begun").readlines()) <= ROUNDS else 60)
        return {"value": 5.5}
    return take
"""

CONTEST = """
from pathlib import Path
from benchmarks.harness.command import main, parser
from benchmarks.harness.contest import Case, Limit
from benchmarks.harness.worker import Contestant
def fake(name, build):
    return Contestant(name, f"fakes:{build}", checkout=Path.cwd())
limit = Limit("products", "GFLOP/s", fake("products", "quick"), "value", 1)
both = (fake("quick", "quick"), fake("slow", "slow"))
case = Case("tiny", "value", "tokens/s", both, limit)
main("fake", lambda _: [case], parser("It.").parse_args())
"""


@pytest.mark.parametrize(
    ("number", "rounds", "shown"),
    [
        (signal.SIGINT, 1, ["quick  1,234 tokens/s", "slow  5.50 tokens/s", "round 2 of 3"]),
        (signal.SIGTERM, 0, ["quick  1,234 tokens/s", "round 1 of 3"]),
    ],
)
def test_a_contest_reports_each_round_and_what_it_has_when_interrupted(
    tmp_path: Path, number: signal.Signals, rounds: int, shown: list[str]
) -> None:
    (tmp_path / "benchmarks").symlink_to(Path("benchmarks").resolve())
    (tmp_path / "fakes.py").write_text(FAKES.replace("ROUNDS", str(rounds)))
    process = subprocess.Popen(
        [sys.executable, "-c", CONTEST, "--rounds", "3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path('src').resolve()}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    begun = tmp_path / "begun"
    while not (begun.exists() and len(begun.read_text().splitlines()) > rounds):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    if number == signal.SIGINT:  # a terminal sends it to every process
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 130, err
    lines = err.splitlines()
    assert lines[:4] == [
        *(f"fake tiny: {name} is ready" for name in ("quick", "slow", "products")),
        "fake tiny: quick, round 1 of 3: 1,234 tokens/s",
    ]
    assert ("fake tiny: products, round 1 of 3: 1,234 GFLOP/s" in lines) == bool(rounds)
    for row in shown:
        assert re.search(row.replace("  ", " +"), out), out


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(MissingError, match="no_such_module is not installed"):
        Worker(Contestant("peer", "no_such_module:build"), threads=1)


def test_a_failure_shows_what_the_contestant_said():
    with pytest.raises(RuntimeError, match=r"peer failed:[\s\S]*TypeError"):
        Worker(Contestant("peer", "benchmarks.start:process", {"nonsense": 1}), threads=1)


def test_counts_of_a_token_are_those_of_the_literature():
    # nanoGPT's own estimate for GPT-2: 6 N + 12 L H Q T, with its tied head counted once.
    gpt2 = TRAINING["gpt2"]
    assert gpt2.training_flops == 6 * (12 * 12 * 768**2 + 50_304 * 768) + 12 * 12 * 768 * 512
    # A token of the 1b shape reads 1.03 billion weights: 22 layers and the head.
    layer = 2048 * (2048 + 512) + 2048 * 2048 + 3 * 2048 * 5632
    assert DECODING["1b"].product_weights == 22 * layer + 32_000 * 2048


def test_our_rows_beside_those_of_another_checkout(tmp_path):
    two = Contestant("Workhorse × 2, data", "a:b")
    case = Case("tiny", "value", "tokens/s", (OURS, PEER, two))

    cases = list(chosen([case], None, tmp_path))

    assert [one.name for one in cases] == ["tiny: Workhorse", "tiny: Workhorse × 2, data"]
    for one, ours in zip(cases, (OURS, two), strict=True):
        assert one.contestants[0] == ours
        assert one.contestants[1].name == "the other checkout"
        assert (one.contestants[1].build, one.contestants[1].checkout) == (ours.build, tmp_path)
    assert next(iter(chosen([case], ["peer"], None))).contestants == (PEER,)


def test_a_contestant_runs_the_code_of_its_checkout(tmp_path):
    (tmp_path / "benchmarks" / "harness").mkdir(parents=True)
    for name in ("__init__.py", "harness/__init__.py", "harness/worker.py"):
        (tmp_path / "benchmarks" / name).write_text(Path(f"benchmarks/{name}").read_text())
    (tmp_path / "src" / "workhorse").mkdir(parents=True)
    (tmp_path / "src" / "workhorse" / "__init__.py").touch()
    (tmp_path / "src" / "workhorse" / "rate.py").write_text(
        "def build(threads):\n    return lambda: {'value': 7.0}\n"
    )
    worker = Worker(Contestant("other", "workhorse.rate:build", checkout=tmp_path), threads=1)
    try:
        assert worker.round()["value"] == 7.0
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--against", "nowhere"], "--against nowhere is not a checkout of this project"),
        (["--against", "nowhere", "--save"], "--save stores the rows of RESULTS.md"),
        (["--only", "Nobody"], "no contestant is left; omit --only"),
        (["--only", "Nobody", "--against", "."], "no contestant is left; omit --only"),
    ],
)
def test_nothing_to_measure(options, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["start", *options])
    case = Case("tiny", "value", "tokens/s", (OURS, PEER))
    with pytest.raises(SystemExit, match=message):
        main("start", lambda _: [case], parser("A benchmark.").parse_args())
