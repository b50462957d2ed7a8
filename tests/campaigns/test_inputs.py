"""Campaign: thousands of wrong inputs give a one-line error each, and do no harm.

`make campaign-inputs` runs it and prints its table. It covers every option and argument of every
verb (as listed by click), every key of a recipe (as listed by the configs), every file of a run, a
model directory, a tokenizer, a data set and a corpus, pairs of wrong options, and cases that need a
separate process. An attempt may be accepted (exit code 0) or rejected (2, with one line). Failures
are a traceback, a hang, a signal, high memory, a half-written file, and a change of a file that the
command does not name.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.campaigns.inputs import options, processes, recipe_keys, stored_files
from tests.campaigns.inputs.attempt import Attempt
from tests.campaigns.inputs.driver import copy
from tests.campaigns.inputs.verdict import wrong_with
from tests.campaigns.inputs.workplace import build

pytestmark = pytest.mark.campaign

WORKERS = 2
LEAST = 3000
GROUPS = (
    *("options", "flags", "words", "pairs", "keys", "overrides", "recipes"),
    *("files", "fields", "lines", "streams", "locales", "home", "others"),
)
ROOT = Path(__file__).parents[2]


class Answer(NamedTuple):
    """The result of an attempt, and the problem with it, if any."""

    name: str
    code: int | None
    seconds: float
    wrong: str


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    """All answers by group."""
    root = tmp_path_factory.mktemp("inputs")
    places = [_place(root, f"driver{number}") for number in range(WORKERS)]
    shares = [_attempts(place)[number::WORKERS] for number, place in enumerate(places)]
    sound = places[0].with_suffix(".sound")
    lines = list(processes.processes())
    with ThreadPoolExecutor(WORKERS) as pool:
        found = [answer for part in pool.map(_drive, places, shares) for answer in part]
        found += pool.map(lambda line: _process(sound, root, *line), enumerate(lines))
    grouped = {group: [a for a in found if a.name.split("/")[0] == group] for group in GROUPS}
    assert sum(map(len, grouped.values())) == len(found) == sum(map(len, shares)) + len(lines)
    _show(grouped)
    return grouped


@pytest.mark.parametrize("group", GROUPS)
def test_every_wrong_input_is_refused_in_one_line(
    answers: dict[str, list[Answer]], group: str
) -> None:
    wrong = [f"{answer.name}: {answer.wrong}" for answer in answers[group] if answer.wrong]
    assert answers[group]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(answers[group])}", *wrong[:40]])


def test_there_are_thousands(answers: dict[str, list[Answer]]) -> None:
    assert sum(map(len, answers.values())) >= LEAST


def test_the_sound_lines_are_accepted(answers: dict[str, list[Answer]]) -> None:
    """The valid command lines succeed, so that rejections are due to the wrong input."""
    codes = {answer.name: answer.code for group in answers.values() for answer in group}
    sound = [f"recipes/{verb}/sound" for verb in ("train", "data prepare", "train --dry-run")]
    sound += [f"options/generate/0/--max-new-tokens={value!r}" for value in ("1", "1000")]
    sound = [name for name in sound if name in codes]
    assert len(sound) >= 3
    assert {codes[name] for name in sound} == {0}


def test_every_verb_has_a_line() -> None:
    assert set(options.commands()) <= set(options.LINES)


def test_what_is_wrong_is_seen() -> None:
    """`wrong_with` recognises each kind of problem."""
    attempt = Attempt("name", [])
    fine = {"code": 2, "bytes": 0, "changed": [], "stderr": "workhorse: no such file\n"}
    assert wrong_with(attempt, fine) == ""
    for change, said in (
        ({"code": None}, "hangs"),
        ({"code": -11}, "signal 11"),
        ({"code": 1, "stderr": "Traceback (most recent call last):\nKeyError"}, "traceback"),
        ({"code": 1}, "exit code 1"),
        ({"bytes": 1 << 40}, "GB"),
        ({"changed": ["run/config.json"]}, "changed run/config.json"),
        ({"code": 0, "changed": ["out/.tmp-x"]}, "left out/.tmp-x"),
        ({"changed": ["tmp/torchinductor_me/x.h"]}, "changed tmp/torchinductor_me/x.h"),
        ({"stderr": ""}, "0 lines"),
        ({"stderr": "workhorse: 'NoneType' is not iterable\n"}, "speaks of"),
        ({"stderr": "workhorse: a\x1b[31m\n"}, "not printable"),
    ):
        assert said in wrong_with(attempt, {**fine, **change})
    compiling, headers = (
        Attempt("name", ["generate", "--execution", "compiled"]),
        ["tmp/torchinductor_me/x.h"],
    )
    assert wrong_with(compiling, {**fine, "changed": headers}) == ""
    assert "changed tmp/x and 0" in wrong_with(compiling, {**fine, "changed": [*headers, "tmp/x"]})


def _attempts(place: Path) -> list[Attempt]:
    """All attempts in a workplace; the names of its data folders depend on its path."""
    sound = place.with_suffix(".sound")
    return [*options.attempts(), *recipe_keys.attempts(), *stored_files.attempts(sound)]


def _place(root: Path, name: str) -> Path:
    """Build a workplace, and the copy next to it that it is restored from.

    It is built at its final path, because prepared data stores the paths of its sources.
    """
    (root / name).mkdir()
    place = root / name / "place"
    build(place)
    copy(place, place.with_suffix(".sound"))
    return place


def _drive(place: Path, attempts: Sequence[Attempt]) -> list[Answer]:
    source = place.parent / "attempts"
    source.write_text("".join(json.dumps(attempt.to_dict()) + "\n" for attempt in attempts))
    with source.open() as stdin:
        done = subprocess.run(
            [sys.executable, "-m", "tests.campaigns.inputs.driver", str(place)],
            stdin=stdin,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=_environment(place),
            check=False,
        )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(attempts), done.stderr[-2000:]
    return [_answer(*pair) for pair in zip(attempts, results, strict=True)]


def _process(sound: Path, root: Path, number: int, process: processes.Process) -> Answer:
    place = root / f"process{number}"
    copy(sound, place)
    result = processes.run(process, place)
    shutil.rmtree(place)
    return _answer(Attempt(process.name, []), result, told=process.told)


def _answer(attempt: Attempt, result: dict[str, Any], told: bool = True) -> Answer:
    wrong = wrong_with(attempt, result, told=told)
    return Answer(attempt.name, result["code"], result["seconds"], wrong)


def _environment(place: Path) -> dict[str, str]:
    """The driver's environment; only the compiled operators differ between machines."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(place / "home"),
        "TMPDIR": str(place / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(place.parent / "inductor"),  # compiled once for all attempts
        "XDG_CACHE_HOME": cache,
        "OMP_NUM_THREADS": "1",
        "OMP_STACKSIZE": "256k",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def _show(groups: dict[str, list[Answer]]) -> None:
    print(f"\n{'group':10} attempts  refused accepted  wrong  slowest")
    for name, found in groups.items():
        codes = Counter(answer.code for answer in found)
        wrong = sum(bool(answer.wrong) for answer in found)
        slowest = max((answer.seconds for answer in found), default=0.0)
        print(f"{name:10} {len(found):8,} {codes[2]:8,} {codes[0]:8,} {wrong:6,} {slowest:7.1f} s")
    print(f"{'all':10} {sum(map(len, groups.values())):8,}")
