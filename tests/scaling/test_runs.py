"""Points read from runs, and the command `workhorse scaling`."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.compare.conftest import study_fields
from workhorse.cli.main import main
from workhorse.errors import WorkhorseError
from workhorse.run import train
from workhorse.scaling import fit_laws, point_of, read_points
from workhorse.train import Recipe, read_metrics, with_init

STEPS = (2, 4, 6, 9, 14)


def recipe(folder: Path, **changes: Any) -> Recipe:
    fields = study_fields(folder)["base"]
    return Recipe.from_dict({**fields, "train": {**fields["train"], **changes}})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    for steps in STEPS:
        train(recipe(folder, steps=steps), folder / f"steps-{steps}")
    return [folder / f"steps-{steps}" for steps in STEPS]


def test_a_point_is_what_its_run_says(runs: list[Path], tmp_path: Path):
    for point, steps in zip(read_points(runs), STEPS, strict=True):
        predicted = point_of(recipe(tmp_path, steps=steps))
        assert point[:2] == predicted[:2]
        assert point.tokens == 32 * steps
        events = read_metrics(runs[0].parent / point.name / "metrics.jsonl")
        *_, validation = [event for event in events if event["kind"] == "validation"]
        assert point.loss == validation["loss"]


def test_the_command(
    runs: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("workhorse.scaling.fit_laws", partial(fit_laws, draws=5))
    words = ["scaling", *map(str, runs), "--predict", str(runs[-1]), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["tokens"] for one in found["runs"]] == [32 * steps for steps in STEPS]
    (law,) = found["laws"]
    assert law["name"] == "power law of compute"
    (prediction,) = law["predictions"]
    assert prediction["low"] <= prediction["loss"] <= prediction["high"]
    assert len(found["left_out"]) == 2
    assert main(words[:-1]) == 0
    assert "at least 7 runs are needed, 5 given" in capsys.readouterr().out


def test_what_cannot_be_fitted(runs: list[Path], tmp_path: Path):
    with pytest.raises(WorkhorseError, match="at least 5 runs are needed, 2 given"):
        fit_laws(runs[:2])
    with pytest.raises(WorkhorseError, match="is not a run directory"):
        read_points([tmp_path])
    constant = recipe(tmp_path, steps=1, schedule={"kind": "constant"})
    train(constant, tmp_path / "constant")
    with pytest.raises(WorkhorseError, match=r"constant ended with 100% of its learning rate"):
        read_points([tmp_path / "constant"])
    again = Recipe.from_dict(
        with_init({**recipe(tmp_path, steps=1).to_dict(), "init": str(runs[0]), "model": {}})
    )
    train(again, tmp_path / "again")
    with pytest.raises(WorkhorseError, match=r"again began from the trained weights of .*steps-2"):
        read_points([tmp_path / "again"])
    other = recipe(tmp_path, steps=1).replace(tokenizer={"kind": "bpe", "vocab_size": 300})
    train(other, tmp_path / "other")
    with pytest.raises(WorkhorseError, match="has other data or another tokenizer than"):
        read_points([runs[0], tmp_path / "other"])
    with pytest.raises(WorkhorseError, match="tiny has other data or another tokenizer than"):
        fit_laws(runs, [other])
    with pytest.raises(WorkhorseError, match=r"steps-2 is given twice"):
        read_points([runs[0], runs[0].parent / "." / "steps-2"])
    stopped = tmp_path / "stopped"
    train(recipe(runs[0].parent, steps=3), stopped)
    metrics = stopped / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    kept = [line for line in lines if line["kind"] != "validation"]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in kept))
    with pytest.raises(WorkhorseError, match="has no loss of the whole validation set"):
        read_points([stopped])
    diverged = [{**line, "loss": None} for line in lines]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in diverged))
    with pytest.raises(WorkhorseError, match="has null as its loss after 3 steps, but only"):
        read_points([stopped])
    for key, name in (("tokens", "tokens"), ("flops_per_token", "FLOPs per token")):
        for wrong in (0, 5e-324, True, 10**400, "many"):
            changed = [line | ({key: wrong} if key in line else {}) for line in lines]
            metrics.write_text("".join(json.dumps(line) + "\n" for line in changed))
            with pytest.raises(
                WorkhorseError, match=rf"stopped.* has .*({name}; omit|{key} is mi)"
            ):
                read_points([stopped])
    earlier = [{**line, "step": 2} for line in lines]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in earlier))
    with pytest.raises(WorkhorseError, match=r"stopped has 2 of 3 steps; finish the run"):
        read_points([stopped])
