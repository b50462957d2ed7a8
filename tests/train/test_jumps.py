"""After a loss spike, a run returns to the last checkpoint and skips rows."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import assert_same_run, step_losses
from workhorse.checkpoints import CheckpointStore
from workhorse.run import train
from workhorse.run.resume import LossSpikeError
from workhorse.train import read_metrics
from workhorse.train.recipe.training import LossSpikeConfig

JUMPS = {"window": 2, "in_a_row": 1}


def jumping_at(monkeypatch: pytest.MonkeyPatch, *losses: float) -> None:
    """Treat these losses as spikes."""
    monkeypatch.setattr(LossSpikeConfig, "is_spike", lambda _, loss, before: loss in losses)


def losses(run: Path) -> list[float]:
    return [loss for _, loss in step_losses(run)]


def backs(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_metrics(run / "metrics.jsonl") if event["kind"] == "back"]


@pytest.mark.parametrize(
    ("before", "loss", "loss_spikes"),
    [
        ([1.0, 3.0], 4.1, True),  # mean 2, deviation 1
        ([1.0, 3.0], 4.0, False),
        ([3.0], 100.0, False),
        ([2.0, 2.0], 2.0, False),
    ],
)
def test_what_a_jump_is(before: list[float], loss: float, loss_spikes: bool) -> None:
    assert LossSpikeConfig(deviations=2.0, window=2).is_spike(loss, before) == loss_spikes


def test_a_run_goes_back_and_on_without_the_rows_since(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run equals one resumed from a checkpoint with a row counter edited by hand."""
    train(make_recipe(), tmp_path / "whole")
    by_hand = tmp_path / "by-hand"
    train(make_recipe(keep=3), by_hand)
    store = CheckpointStore(by_hand / "checkpoints")
    for step in (8, 12):
        shutil.rmtree(store.path(step))
    at = store.load(4)
    at.state["counters"]["rows"] = 7 * 4
    shutil.rmtree(store.path(4))
    store.save(4, at.model, at.optimizer, at.state)
    train(make_recipe(keep=3), by_hand, resume=True)

    jumping_at(monkeypatch, losses(tmp_path / "whole")[6])
    train(make_recipe(loss_spikes=JUMPS), tmp_path / "run")
    assert_same_run(by_hand, tmp_path / "run")
    (back,) = backs(tmp_path / "run")
    assert (back["step"], back["jumped"], back["rows"]) == (4, 7, 3 * 4)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "loss spike at step 7: resuming from step 4 and skipping 12 rows" in page


def test_the_losses_it_compares_with_survive_a_stop(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[float]] = []

    def note(_: LossSpikeConfig, loss: float, before: list[float]) -> bool:
        del loss
        seen.append(before)
        return False

    monkeypatch.setattr(LossSpikeConfig, "is_spike", note)
    constant = {"loss_spikes": JUMPS, "schedule": {"kind": "constant"}}
    train(make_recipe(**constant), tmp_path / "whole")
    whole = seen.copy()
    seen.clear()
    train(make_recipe(**constant, steps=5), tmp_path / "run")
    train(make_recipe(**constant), tmp_path / "run", resume=True)
    assert [len(before) for before in whole] == [0, 1, *[2] * 10]
    assert seen[:5] == whole[:5]
    assert seen[5] == losses(tmp_path / "run")[3:5]


def test_no_checkpoint_is_saved_while_the_loss_is_high(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make_recipe(), tmp_path / "whole")
    jumping_at(monkeypatch, losses(tmp_path / "whole")[7])
    train(make_recipe(loss_spikes={**JUMPS, "in_a_row": 2}), tmp_path / "run")
    assert CheckpointStore(tmp_path / "run/checkpoints").steps() == [12, 4]
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_where_nothing_is_saved_a_jump_is_the_end(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossSpikeConfig, "is_spike", lambda _, loss, before: len(before) == 2)
    with pytest.raises(LossSpikeError, match="loss spike at step 3, but no checkpoint has been"):
        train(make_recipe(loss_spikes=JUMPS), tmp_path / "run")


def test_a_run_does_not_go_back_for_ever(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossSpikeConfig, "is_spike", lambda _, loss, before: len(before) == 2)
    recipe = make_recipe(loss_spikes={**JUMPS, "most": 3}, checkpoint_every=2)
    line = "loss spike at step 3, after returning to a checkpoint 3 times"
    with pytest.raises(LossSpikeError, match=line):
        train(recipe, tmp_path / "run")
    (back,) = backs(tmp_path / "run")  # only the latest, as no checkpoint followed the others
    assert back["rows"] == 3 * 4
