"""Campaign: kills and damage never change a run; they only cost time since the last checkpoint.

`make campaign-faults` runs it and prints its figures. The system keeps the writes of a killed
process, so this does not test power failures, which the syncs are for.
"""

import json
import random
import shutil
import signal
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.campaigns.fault_driver import POINTS, main
from tests.parallel.forked import FORKS
from workhorse.checkpoints import CheckpointStore
from workhorse.config.base import read_yaml
from workhorse.files.text_formats import write_yaml
from workhorse.train import read_metrics

pytestmark = pytest.mark.campaign

RECIPES = read_yaml(Path(__file__).with_name("faults.yaml"))
RANDOM_KILLS = 30
DAMAGED = 500
RESUMED_AFTER_DAMAGE = 5

Losses = list[tuple[str, int, float]]


class Runs:
    """Runs of one recipe over one corpus, as processes.

    Args:
        folder: a folder for the corpora, the recipe, and the runs.
        name: the name of the recipe in `faults.yaml`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        write_corpora(folder)
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(write_yaml(RECIPES["recipe"]).replace("FOLDER", str(folder)))
        self.steps = RECIPES["recipe"]["train"]["steps"]
        self.settings: list[str] = []
        settings = [one.replace("FOLDER", str(folder)) for one in RECIPES["runs"][name]]
        if settings:
            assert self.finish(folder / "base") == 0
        self.settings = settings

    def start(self, out: Path, *words: str) -> tuple[BaseProcess, Any]:
        """Fork a process that trains in `out`; see `fault_driver`. Its messages can be received."""
        receiver, sender = FORKS.Pipe(duplex=False)
        given = (sender, str(self.recipe), str(out), *self.settings, *words)
        process = FORKS.Process(target=main, args=given)
        process.start()
        sender.close()
        return process, receiver

    def finish(self, out: Path, *words: str) -> int | None:
        """Train until the process ends, and return its exit status."""
        process, receiver = self.start(out, *words)
        with receiver:
            process.join()
        return process.exitcode

    def kill(self, out: Path, messages: int, seconds: float, *words: str) -> int | None:
        """Train, kill the process `seconds` after its first messages, and return its status."""
        process, receiver = self.start(out, *words)
        with receiver:
            for _ in range(messages):
                with suppress(EOFError):
                    receiver.recv()
            time.sleep(seconds)
            process.kill()
            process.join()
        return process.exitcode


def write_corpora(folder: Path) -> None:
    """Write text, conversations, and pairs of answers."""
    words = random.Random(0).choices(["one ", "two ", "three ", "four\n", "five, "], k=20_000)
    (folder / "corpus.txt").write_text("".join(words))
    records: dict[str, list[dict[str, Any]]] = {"conversations": [], "pairs": []}
    for number in range(100):
        question = [{"role": "user", "content": f"{number}+1?"}]
        right, wrong = (
            [{"role": "assistant", "content": str(answer)}] for answer in (number + 1, number)
        )
        records["conversations"].append({"messages": [*question, *right]})
        records["pairs"].append({"prompt": question, "chosen": right, "rejected": wrong})
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of pretraining, or of the recipe that the test names."""
    return Runs(tmp_path_factory.mktemp("faults"), getattr(request, "param", "pretraining"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    """The undisturbed run."""
    out = runs.folder / "whole"
    assert runs.finish(out) == 0
    return out


def losses(out: Path) -> Losses:
    """The loss of every step and validation; empty if the process was killed before the first."""
    if not (out / "metrics.jsonl").exists():
        return []
    events = read_metrics(out / "metrics.jsonl")
    kinds = ("step", "validation")
    return [(one["kind"], one["step"], one["loss"]) for one in events if one["kind"] in kinds]


def final_files(out: Path, step: int) -> list[bytes]:
    folder = CheckpointStore(out / "checkpoints").path(step)
    return [(folder / f"{part}.safetensors").read_bytes() for part in ("model", "optimizer")]


def assert_same(runs: Runs, out: Path, whole: Path) -> None:
    assert losses(out) == losses(whole)
    assert final_files(out, runs.steps) == final_files(whole, runs.steps)


@pytest.mark.parametrize("runs", RECIPES["runs"], indirect=True)
def test_kills_at_random_moments(runs: Runs, whole: Path) -> None:
    """Half of them before the first step: while it prepares data or a reference, or resumes."""
    chance = random.Random(1)
    kills = finished = lost_steps = 0
    began = time.perf_counter()
    process, receiver = runs.start(runs.folder / "timed")
    receiver.recv()
    started = time.perf_counter()
    receiver.recv()
    preparation = time.perf_counter() - started
    process.join()
    while kills < RANDOM_KILLS:
        out = runs.folder / f"random-{finished}"
        while kills < RANDOM_KILLS:
            early, steps = kills % 2 == 0, chance.randrange(runs.steps // 2)
            # A step with its share of a checkpoint takes hundredths of a second.
            moment = (1, preparation) if early else (2 + steps, 0.05)
            status = runs.kill(out, moment[0], chance.uniform(0, moment[1]))
            if status == 0:
                break  # it had already finished
            assert status == -signal.SIGKILL
            kills += 1
            so_far = losses(out)
            assert so_far == losses(whole)[: len(so_far)]
            store = CheckpointStore(out / "checkpoints")
            for step in store.steps():
                store.check(step)
            lost_steps += max((step for _, step, _ in so_far), default=0)
            lost_steps -= max(store.steps(), default=0)
        assert runs.finish(out) == 0
        assert_same(runs, out, whole)
        finished += 1
    print(
        f"\n{runs.name}: {kills} kills at random moments in {finished} runs: every loss and the "
        f"final weights and optimizer bit-identical; a kill lost {lost_steps / kills:.1f} steps on "
        f"average; {time.perf_counter() - began:.0f} s"
    )


def test_kills_while_a_run_goes_on_with_changes(runs: Runs, tmp_path: Path) -> None:
    """Resume twice with changed settings, with kills before and after the first checkpoint."""
    first = ("train.steps=20",)
    more_steps = ("train.batch_size=6", "train.optimizer.learning_rate=0.01")
    second = ("train.steps=41", *more_steps)
    third = (*more_steps[:1], "train.grad_clip=0.5", "train.schedule.kind=cosine")
    whole = tmp_path / "whole"
    for settings in (first, second, third):
        assert runs.finish(whole, *settings) == 0
    chance = random.Random(3)
    killed = tmp_path / "killed"
    assert runs.finish(killed, *first) == 0
    kills = 0
    for settings in (second, third):
        for _ in range(6):
            status = runs.kill(killed, chance.randrange(9), chance.uniform(0, 0.02), *settings)
            assert status in (0, -signal.SIGKILL)
            kills += status != 0
        assert runs.finish(killed, *settings) == 0
    assert_same(runs, killed, whole)
    assert changes(killed) == changes(whole)
    print(f"\n{kills} kills of a run that resumes with changes: {len(changes(whole))} are recorded")


def changes(out: Path) -> list[dict[str, object]]:
    """Every change recorded in a run's metrics."""
    events = read_metrics(out / "metrics.jsonl")
    return [event for event in events if event["kind"] == "change"]


@pytest.mark.parametrize("point", POINTS)
def test_kill_inside_a_save(runs: Runs, whole: Path, point: str) -> None:
    out = runs.folder / f"save-{POINTS.index(point)}"
    # keep is 3: the fourth save is the first that removes one
    assert runs.finish(out, point, "4") == -signal.SIGKILL, "the point was not reached"
    so_far = losses(out)
    assert runs.finish(out) == 0
    assert so_far == losses(whole)[: len(so_far)]
    assert_same(runs, out, whole)
    leftovers = [path.name for path in (out / "checkpoints").iterdir() if path.name[0] == "."]
    assert not leftovers


def test_damaged_checkpoints(runs: Runs, whole: Path, tmp_path: Path) -> None:
    chance = random.Random(2)
    store = CheckpointStore(whole / "checkpoints")
    newest, older, *_ = store.steps()
    expected = load_file(store.path(older) / "model.safetensors")
    counts: dict[str, int] = {}
    for number in range(DAMAGED):
        out = tmp_path / f"damaged-{number}"
        shutil.copytree(whole, out)
        damaged = CheckpointStore(out / "checkpoints")
        kind = damage(damaged.path(newest), chance)
        counts[kind] = counts.get(kind, 0) + 1
        skipped: list[str] = []
        found = damaged.newest(skipped.append)
        assert found is not None, kind
        assert found.step == older, kind
        assert len(skipped) == 1, kind
        assert all((found.model[name] == expected[name]).all() for name in expected)
        if number < RESUMED_AFTER_DAMAGE:
            assert runs.finish(out) == 0
            assert_same(runs, out, whole)
        shutil.rmtree(out)
    print(f"\n{DAMAGED} damaged checkpoints, all detected, the older one used: {counts}")


def damage(checkpoint: Path, chance: random.Random) -> str:
    """Damage a file of a checkpoint in a random way; return the kind and the file."""
    file = chance.choice(sorted(checkpoint.iterdir()))
    kind = chance.choice(["flipped bit", "truncation", "missing file"])
    content = bytearray(file.read_bytes())
    if kind == "flipped bit":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
    elif kind == "truncation":
        file.write_bytes(content[: chance.randrange(len(content))])
    else:
        file.unlink()
    return f"{kind} ({file.name})"
