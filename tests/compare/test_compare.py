"""Complete studies: stopped, killed and resumed, in one process and in several."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import scipy.stats
import torch
import yaml

from studies.publish import publish
from tests.compare.conftest import FEED_FORWARD, PLAIN, MakeStudy, without_costs
from workhorse.compare import Comparison, Study, compare, dry_run
from workhorse.compare.folder import StudyFolder
from workhorse.compare.plan import Trial
from workhorse.compare.run import seconds_of_step
from workhorse.data import read_documents
from workhorse.errors import WorkhorseError
from workhorse.evaluate import evaluate
from workhorse.memory.step_memory import PlannedStep
from workhorse.model.load import load
from workhorse.run import train
from workhorse.train import Event, Recipe, StopSignals, read_metrics

CPU = torch.device("cpu")
Finished = tuple[Study, Comparison]


def starts(out: Path) -> dict[str, int]:
    """The number of times each trial was started or resumed."""
    return {
        str(file.parent.relative_to(out)): sum(
            event["kind"] == "start" for event in read_metrics(file)
        )
        for file in out.glob("trials/*/*/metrics.jsonl")
    }


def test_the_figures_are_those_of_the_runs(finished: Finished):
    """`train` on its own gives the same losses, and SciPy the same statistics."""
    study, found = finished
    results = found.results
    assert results is not None
    losses: dict[str, list[float]] = {}
    for name, one in results["variants"].items():
        rate = one["learning_rate_factor"]
        assert one["search"][f"{rate:g}"] == min(one["search"].values())
        run = found.folder / "trials" / name / "seed-2"
        recipe = Recipe.from_dict(yaml.safe_load((run / "recipe.yaml").read_text()))
        assert recipe.train.optimizer.learning_rate == pytest.approx(1e-3 * rate)
        alone = train(recipe, found.folder.parent / f"alone-{name}")
        assert one["losses"]["2"] == alone.validation_loss
        assert one["tokens"] == alone.tokens == 6 * 32
        assert one["parameters"] == alone.parameters
        assert one["cost"]["peak_memory"] > 2**16
        losses[name] = list(one["losses"].values())
    theirs = scipy.stats.ttest_rel(losses["gated"], losses["plain"])
    span = theirs.confidence_interval(0.95)
    off = results["variants"]["gated"]["difference"]
    assert (off["low"], off["high"]) == pytest.approx((span.low, span.high))
    assert off["p"] == pytest.approx(theirs.pvalue)
    assert results["variants"]["plain"]["verdict"] is None
    assert study.seeds == (1, 2)


def test_losses_by_context_are_those_of_evaluate(finished: Finished):
    _, found = finished
    results = found.results
    assert results is not None
    by_context = results["variants"]["plain"]["by_context"]
    losses = {}
    for seed in ("1", "2"):
        model = load(found.folder / "trials" / "plain" / f"seed-{seed}", dtype="float32")
        assert model.data is not None
        (source,) = model.data.sources.values()
        for context in (4, 16):
            texts = read_documents(source, "validation")
            alone = evaluate(model.decoder, model.text, texts, start=model.start, context=context)
            losses[seed, context] = alone.loss
            assert by_context[str(context)]["losses"][seed] == alone.loss
    more = [losses[seed, 16] - losses[seed, 4] for seed in ("1", "2")]
    assert by_context["16"]["more"]["mean"] == pytest.approx(sum(more) / 2)
    assert by_context["4"]["more"]["mean"] == 0
    assert "Difference from context 4" in (found.folder / "report.md").read_text()


def test_one_seed_gives_the_same_order_of_the_data_and_the_same_start(finished: Finished):
    """Before the first update, models with equal weights have the same loss on the same rows."""
    _, found = finished
    losses = {
        folder.name: next(e["loss"] for e in read_metrics(folder / "metrics.jsonl") if "loss" in e)
        for folder in (found.folder / "trials" / "gated").iterdir()
    }
    assert losses["rate-1.0"] == losses["rate-4.0"]
    assert losses["seed-1"] != losses["seed-2"]


def test_the_reports_say_what_was_found(finished: Finished):
    _, found = finished
    results = json.loads((found.folder / "results.json").read_text())
    assert results == found.results
    text = (found.folder / "report.md").read_text()
    page = (found.folder / "report.html").read_text()
    words = results["variants"]["gated"]["verdict"]["words"]
    assert words in text
    assert words in page
    assert page.count("<svg") == 2
    assert "<polygon" in page
    assert "http://" not in page
    assert "https://" not in page
    assert "is at an end of the list" in text


def test_a_study_is_published_with_a_picture_that_stands_alone(finished: Finished, tmp_path: Path):
    _, found = finished
    page = publish(found.folder, tmp_path)
    assert "workhorse compare studies/gates.yaml" in page.read_text()
    root = ElementTree.fromstring((tmp_path / "gates.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
    assert {"plain", "gated"} <= set("".join(root.itertext()).split())
    assert "--c1: #" in (tmp_path / "gates.svg").read_text()


def test_a_finished_study_is_not_repeated(finished: Finished):
    study, found = finished
    before = starts(found.folder)
    texts = {name: (found.folder / name).read_text() for name in ("results.json", "report.md")}
    assert set(before.values()) == {1}
    again = compare(study, found.folder)
    assert again.results == found.results
    assert starts(found.folder) == before
    assert {name: (found.folder / name).read_text() for name in texts} == texts


def test_a_seed_and_a_variant_may_be_added_and_the_question_reworded(
    make_study: MakeStudy, tmp_path: Path
):
    out = tmp_path / "out"
    compare(make_study(seeds=[1]), out)
    study = make_study(seeds=[3, 1])
    other = {FEED_FORWARD: {**PLAIN, "activation": "relu"}}
    study = study.replace(variants={**study.variants, "relu": other}, question="Do gates pay?")
    found = compare(study, out)
    assert found.results
    assert found.results["question"] == "Do gates pay?"
    assert found.trials == 6
    assert set(starts(out).values()) == {1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seeds": [1, 3]}, "seed 2 was removed from seeds since"),
        ({"budget": {"steps": 7, "parameters": True}}, "budget.steps changed from 6 to 7 since"),
        ({"baseline": "gated"}, "baseline changed from 'plain' to 'gated' since"),
        (
            {"variants": {"plain": {}, "c": {FEED_FORWARD: PLAIN}}},
            "'gated' was removed from variants since",
        ),
    ],
)
def test_another_change_is_refused_by_name(finished: Finished, changes: dict[str, Any], said: str):
    study, found = finished
    before = (found.folder / "study.yaml").read_text()
    with pytest.raises(WorkhorseError, match=said):
        compare(study.replace(**changes), found.folder)
    assert (found.folder / "study.yaml").read_text() == before


def test_a_change_of_the_base_is_refused_by_name(finished: Finished):
    study, found = finished
    assert isinstance(study.base, dict)
    base = {**study.base, "train": {**study.base["train"], "batch_size": 4}}
    with pytest.raises(WorkhorseError, match=r"base.train.batch_size changed from 2 to 4"):
        compare(study.replace(base=base), found.folder)
    described = study.replace(base={**study.base, "description": "in other words"})
    assert compare(described, found.folder).results == found.results


def test_a_misspelt_key_is_no_change(finished: Finished):
    study, found = finished
    assert isinstance(study.base, dict)
    misspelt = {**study.base, "train": {**study.base["train"], "batchsize": 4}}
    for run in (compare, dry_run):
        with pytest.raises(WorkhorseError, match="did you mean 'batch_size'"):
            run(study.replace(base=misspelt), found.folder)


def test_one_seed_gives_no_interval_and_no_verdict(make_study: MakeStudy, tmp_path: Path):
    results = compare(make_study(seeds=[1]), tmp_path / "out").results
    assert results is not None
    gated = results["variants"]["gated"]
    assert (gated["low"], gated["difference"]) == (None, None)
    assert gated["verdict"]["words"].startswith("one seed: no interval and no verdict")


def test_a_variant_that_diverges_has_no_verdict(make_study, fields, tmp_path: Path):
    train_section = {**fields["base"]["train"], "max_bad_steps": 1}
    wild = {"train.optimizer": {"kind": "adamw", "learning_rate": 1e30}, "train.grad_clip": None}
    study = make_study(
        base={**fields["base"], "train": train_section},
        variants={"plain": {}, "wild": wild},
        learning_rates=[1, 2],
    )
    found = compare(study, tmp_path / "out")
    assert found.results is not None
    variant = found.results["variants"]["wild"]
    assert variant["diverged"] == [1, 2]
    assert variant["mean"] is None
    assert variant["verdict"]["words"] == "no verdict: wild diverged on at least one seed"
    assert "not finite" in (tmp_path / "out" / "report.md").read_text()
    assert set(starts(tmp_path / "out").values()) == {1}


def test_a_step_is_timed_with_its_adapter(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen weights have no gradients, so a step with an adapter takes less time."""
    planned: list[PlannedStep] = []
    monkeypatch.setattr("workhorse.compare.run.time_steps", lambda step: planned.append(step) or 2)
    base = {**fields["base"], "init": "runs/base", "adapter": {"rank": 2}}
    sizes = {"vocab_size": 257, "max_seq_len": 16}
    recipe = Recipe.from_dict({**base, "model": {**base["model"], **sizes}})
    assert seconds_of_step(recipe, 257) == 2
    assert planned == [PlannedStep.of_recipe(recipe, recipe.decoder_config(257), CPU)]
    assert planned[0].adapter == recipe.adapter is not None


def test_seconds_are_measured_once(
    make_study: MakeStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    measured: list[float] = []

    def measure(*_: object) -> float:
        measured.append(0.004 + 0.001 * len(measured))
        return measured[-1]

    monkeypatch.setattr("workhorse.compare.run.time_steps", measure)
    study = make_study(budget={"seconds": 0.02}, seeds=[1])
    first = compare(study, tmp_path / "out").results
    timings = tmp_path / "out" / "timings.json"
    seconds = json.loads(timings.read_text())
    assert list(seconds.values()) == measured
    assert first is not None
    for name, one in first["variants"].items():
        assert one["steps"] == int(0.02 // seconds[name])
    timings.write_text(json.dumps(dict.fromkeys(seconds, 0.01)))
    planned = dry_run(study, tmp_path / "out")
    assert {one["steps"] for one in planned["variants"].values()} == {2}


def test_tokenizers_are_compared_in_bits_per_byte(make_study: MakeStudy, tmp_path: Path):
    tokenizers = {"bytes": {}, "bpe": {"tokenizer": {"kind": "bpe", "vocab_size": 300}}}
    study = make_study(variants=tokenizers, baseline="bytes", budget={"steps": 20})
    results = compare(study, tmp_path / "out").results
    assert results is not None
    assert results["unit"] == "bits per byte"
    loss = results["variants"]["bytes"]["losses"]["1"]
    run = read_metrics(tmp_path / "out" / "trials" / "bytes" / "seed-1" / "metrics.jsonl")
    *_, last = (event for event in run if event["kind"] == "validation")
    assert loss == last["bits_per_byte"]
    assert results["variants"]["bpe"]["verdict"]["outcome"]


def test_models_that_learned_nothing_have_no_verdict(make_study: MakeStudy, tmp_path: Path):
    still = {"train.optimizer": {"kind": "adamw", "learning_rate": 1e-9}}
    gate = {"gated": {}, "plain": {FEED_FORWARD: PLAIN}}
    variants = {name: {**still, **changes} for name, changes in gate.items()}
    results = compare(make_study(variants=variants), tmp_path / "out").results
    assert results is not None
    words = results["variants"]["gated"]["verdict"]["words"]
    assert words == "no verdict: neither plain nor gated learned anything, see the notes"
    guess = math.log(results["variants"]["gated"]["vocab_size"])
    for name, one in results["variants"].items():
        line = f"{name} learned nothing: its loss is {one['mean']:.4f} nats per token, and a uni"
        (note,) = [note for note in results["notes"] if note.startswith(line)]
        assert f" = {guess:.4f}; train for more steps" in note
    learned = {**variants, "gated": {"train.optimizer.learning_rate": 0.03}}
    results = compare(
        make_study(variants=learned, budget={"steps": 30}), tmp_path / "learned"
    ).results
    assert results is not None
    assert results["variants"]["gated"]["verdict"]["outcome"] == "better"
    assert [note.split()[0] for note in results["notes"] if "learned nothing" in note] == ["plain"]


def test_a_dry_run_tells_all_trials_and_writes_nothing(make_study: MakeStudy, tmp_path: Path):
    found = dry_run(make_study(learning_rates=[1, 2]), tmp_path / "out")
    assert len(found["trials"]) == 4 + 4
    assert found["variants"]["plain"]["tokens"] == 6 * 32
    assert found["seconds"] > 0
    assert not (tmp_path / "out").exists()


DRIVER = """
import os, signal, sys
from workhorse.compare import compare, read_study

def die(event):
    if event["kind"] == "step" and event["step"] == 5 and event["trial"] == sys.argv[4]:
        os.kill(os.getpid(), signal.SIGKILL)

compare(read_study(sys.argv[1]), sys.argv[2], jobs=int(sys.argv[3]), on_event=die)
"""


def killed(study: Study, out: Path, trial: str, jobs: int = 1) -> None:
    """Run a study in a process that is killed at the fifth step of a trial."""
    file = out.with_name("study.yaml")
    file.write_text(yaml.safe_dump(study.to_dict()))
    words = [sys.executable, "-c", DRIVER, str(file), str(out), str(jobs), trial]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_killed_study_goes_on_in_the_middle_of_a_trial(finished: Finished, tmp_path: Path):
    study, whole = finished
    out = tmp_path / "out"
    killed(study, out, "plain, seed 1")
    assert not (out / "trials" / "plain" / "seed-1" / "trial.json").exists()
    assert not (out / "results.json").exists()
    found = compare(study, out)
    again = {name for name, count in starts(out).items() if count > 1}
    assert again == {"trials/plain/seed-1"}
    steps = [
        event["step"]
        for event in read_metrics(out / "trials" / "plain" / "seed-1" / "metrics.jsonl")
        if event["kind"] == "start"
    ]
    assert steps[0] == 0
    assert steps[1] in (2, 4)  # step 4's checkpoint is written during step 5
    assert without_costs(found.results) == without_costs(whole.results)


def test_an_interrupted_study_saves_and_goes_on(finished: Finished, tmp_path: Path):
    study, whole = finished

    def interrupt(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 5 and event["trial"] == "gated, seed 2":
            os.kill(os.getpid(), signal.SIGINT)

    found = compare(study, tmp_path / "out", on_event=interrupt, signals=StopSignals())
    assert (found.stopped_by, found.results, found.done) == ("SIGINT", None, 6)
    found = compare(study, tmp_path / "out")
    assert without_costs(found.results) == without_costs(whole.results)


def test_trials_at_once_save_when_their_study_is_killed_and_give_the_same_results(
    make_study: MakeStudy, tmp_path: Path
):
    study = make_study(seeds=[1], budget={"steps": 100})
    out = tmp_path / "out"
    killed(study, out, "plain, seed 1", jobs=2)
    found = compare(study, out, jobs=2)  # waits until the killed study's trials have saved
    begun = read_metrics(out / "trials" / "plain" / "seed-1" / "metrics.jsonl")
    first, second = (event["step"] for event in begun if event["kind"] == "start")
    assert first == 0
    assert 5 <= second < 100
    whole = compare(study, tmp_path / "whole")
    assert without_costs(found.results) == without_costs(whole.results)


def test_a_signal_between_trials_stops_the_study(make_study: MakeStudy, tmp_path: Path):
    def stop_after_one(event: Event) -> None:
        if event["kind"] == "end_of_trial":
            os.kill(os.getpid(), signal.SIGTERM)

    study = make_study()
    stopped = compare(study, tmp_path / "out", on_event=stop_after_one, signals=StopSignals())
    assert (stopped.stopped_by, stopped.done) == ("SIGTERM", 1)
    assert compare(study, tmp_path / "out").done == stopped.trials


def test_an_error_in_a_process_of_its_own_is_one_line(make_study: MakeStudy, tmp_path: Path):
    study = make_study(seeds=[1])
    folder = StudyFolder(tmp_path / "out")
    folder.begin(study)
    somebodys = folder.trial(Trial("gated", 1))
    somebodys.mkdir(parents=True)
    (somebodys / "mine.txt").write_text("something else")
    with pytest.raises(WorkhorseError, match=r"^gated, seed 1: .* is not empty and not a run"):
        compare(study, folder.path, jobs=2)
    assert "mine.txt" in os.listdir(somebodys)


def test_damaged_files_of_a_study_are_named(finished: Finished, tmp_path: Path):
    study, found = finished
    out = tmp_path / "out"
    shutil.copytree(found.folder, out)
    outcome = out / "trials" / "plain" / "seed-1" / "trial.json"
    whole = json.loads(outcome.read_text())
    for changes, said in [
        ({"loss": "low"}, "loss: 'low' is not a number"),
        ({"loss": None}, "a loss is missing, and diverged is not set"),
        ({"versions": None}, "versions: expected settings, got null"),
        ({"seconds": []}, r"seconds: \[\] is not a number"),
        ({"by_context": {}}, "by_context: the context lengths differ from the study's"),
        ({"by_context": {"4": {}, "16": {}}}, "by_context.4: 'loss' is missing"),
    ]:
        outcome.write_text(json.dumps({**whole, **changes}))
        with pytest.raises(WorkhorseError, match=rf"trial.json is damaged \({said}\); delete it"):
            compare(study, out)
    outcome.write_text("{}")
    with pytest.raises(WorkhorseError, match=r"trial.json is damaged \('loss' is missing\)"):
        compare(study, out)
    outcome.write_text("{")
    with pytest.raises(WorkhorseError, match=r"trial.json is damaged \(.* no.* JSON.*delete it"):
        compare(study, out)
    outcome.unlink()
    assert without_costs(compare(study, out).results) == without_costs(found.results)
    metrics = outcome.with_name("metrics.jsonl")
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"kind": "validation"' not in line))
    outcome.unlink()
    with pytest.raises(
        WorkhorseError, match=r"metrics.jsonl is damaged: it has no start, or no validation"
    ):
        compare(study, out)
    metrics.write_text("".join(lines))
    (out / "timings.json").write_text('{"plain": 0}')
    with pytest.raises(WorkhorseError, match=r"timings.json is damaged"):
        compare(study, out)
    (out / "study.yaml").write_text("seeds: 3\n")
    with pytest.raises(WorkhorseError, match=r"study.yaml is damaged"):
        compare(study, out)
