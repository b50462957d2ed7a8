"""Training runs from the first step to the last."""

import json
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import workhorse
from tests.train.runs import assert_same_run, notices, step_losses, weights
from workhorse.checkpoints import CheckpointStore, RunDirectory
from workhorse.checkpoints.stored import TrainedModel
from workhorse.data import Batch, Document
from workhorse.errors import WorkhorseError
from workhorse.evaluate import evaluate
from workhorse.run import train
from workhorse.train import Recipe, StopSignals, read_metrics
from workhorse.train.loop import Loop
from workhorse.train.objectives.next_token import NextToken
from workhorse.train.objectives.objective import Outcome
from workhorse.train.step.step import TrainingStep
from workhorse.train.validation import Validator


def test_a_run_learns_and_leaves_what_it_says(make_recipe, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = train(make_recipe(steps=40), out)
    losses = [loss for _, loss in step_losses(out)]
    assert losses[-1] < losses[0] - 0.3
    assert result.step == result.steps == 40
    assert result.loss == losses[-1]
    assert result.tokens == 40 * 4 * 16
    assert result.stopped_by is None
    assert result.parameters == sum(tensor.numel() for tensor in weights(out, 40).values())
    names = {path.name for path in out.iterdir()}
    assert names >= {"recipe.yaml", "config.json", "tokenizer", "metrics.jsonl", "report.html"}
    assert CheckpointStore(out / "checkpoints").steps() == [40, 36]
    assert Recipe.from_dict(RunDirectory(out).recipe()) == make_recipe(steps=40)


def test_the_saved_decoder_has_the_loss_that_was_measured(make_recipe, tmp_path: Path) -> None:
    result = train(make_recipe(), tmp_path / "run")
    run = TrainedModel(tmp_path / "run")
    decoder = run.load_decoder()
    assert not decoder.training
    text = (tmp_path / "corpus.txt").read_text()
    held_out = text[int(0.9 * len(text)) :]
    tokens = torch.tensor([*run.tokenizer().encode(held_out), run.tokenizer().eos_id])
    total = 0.0
    for start in range(0, len(tokens) - 1, 16):
        window = tokens[start : start + 17]
        logits = decoder(window[None, :-1]).log_softmax(-1)[0]
        total -= float(logits.gather(1, window[1:, None]).detach().sum())
    assert result.validation_loss == pytest.approx(total / (len(tokens) - 1), abs=1e-4)
    bits = result.validation_loss * len(tokens) / len(held_out.encode()) / 0.6931471805599453
    assert result.bits_per_byte == pytest.approx(bits)


def test_the_seed_decides_everything(make_recipe, tmp_path: Path) -> None:
    train(make_recipe(), tmp_path / "one")
    train(make_recipe(), tmp_path / "same")
    train(make_recipe(seed=1), tmp_path / "other")
    assert_same_run(tmp_path / "one", tmp_path / "same")
    assert step_losses(tmp_path / "one") != step_losses(tmp_path / "other")


def test_on_cuda_batches_wait_in_pinned_memory(make_recipe, tmp_path: Path, monkeypatch) -> None:
    """CUDA and pinning are simulated: the step claims to be on CUDA; no memory is pinned."""
    pinned: list[int] = []

    def note(batch: Batch) -> Batch:
        pinned.append(len(batch.tokens))
        return batch

    def read(loop: Loop, step: int) -> Batch | None:
        loop.step.device = torch.device("cuda")
        try:
            return plain(loop, step)
        finally:
            loop.step.device = torch.device("cpu")

    plain = Loop._read
    monkeypatch.setattr(Batch, "pinned", note)
    monkeypatch.setattr(Loop, "_read", read)
    train(make_recipe(), tmp_path / "run")
    assert pinned == [4] * 12


def test_validation_and_samples_change_nothing(make_recipe, tmp_path: Path) -> None:
    train(make_recipe(), tmp_path / "plain")
    samples = {"every": 2, "prompts": ["1", ""], "max_new_tokens": 3}
    train(make_recipe(eval_every=1, eval_batches=1, samples=samples), tmp_path / "looked-at")
    assert_same_run(tmp_path / "plain", tmp_path / "looked-at")
    events = read_metrics(tmp_path / "looked-at" / "metrics.jsonl")
    written = [event["samples"] for event in events if event["kind"] == "samples"]
    assert len(written) == 6
    assert [sample["prompt"] for sample in written[0]] == ["1", ""]
    whole = [event["whole"] for event in events if event["kind"] == "validation"]
    assert whole == [False] * 11 + [True]


def test_a_run_is_validated_along_the_way_unless_told_otherwise(
    make_recipe, tmp_path: Path
) -> None:
    def validated(name: str, **train_config: Any) -> list[tuple[int, int, bool]]:
        train(make_recipe(steps=25, batch_size=2, **train_config), tmp_path / name)
        events = read_metrics(tmp_path / name / "metrics.jsonl")
        found = [event for event in events if event["kind"] == "validation"]
        return [(event["step"], event["tokens"], event["whole"]) for event in found]

    ((_, whole, _),) = validated("never", eval_every=None)
    assert whole > 10 * 2 * 16
    assert validated("by itself") == [(10, 32, False), (20, 32, False), (25, whole, True)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_was(
    make_recipe, tmp_path: Path, number: signal.Signals
) -> None:
    def stop_at_six(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 6:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    train(make_recipe(), tmp_path / "whole")
    result = train(make_recipe(), tmp_path / "run", on_event=stop_at_six, signals=StopSignals())
    assert (result.stopped_by, result.step) == (number.name, 6)
    assert CheckpointStore(tmp_path / "run/checkpoints").steps() == [6, 4]
    assert signal.getsignal(number) == before
    train(make_recipe(), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_shard_cut_short_meanwhile_costs_no_step(make_recipe, tmp_path: Path) -> None:
    def cut(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 6:
            (shard,) = (tmp_path / "run/data").glob("*/train-*.tokens.npy")
            os.truncate(shard, shard.stat().st_size - 1)

    train(make_recipe(), tmp_path / "whole")
    with pytest.raises(
        WorkhorseError, match=r"tokens\.npy was truncated while it was in use: it has"
    ):
        train(make_recipe(), tmp_path / "run", on_event=cut)
    assert CheckpointStore(tmp_path / "run/checkpoints").steps() == [6, 4]
    train(make_recipe(), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_second_interrupt_acts_at_once(make_recipe, tmp_path: Path) -> None:
    def stop_twice(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 6:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    # A shell starts background jobs with SIGINT ignored, so the handler is set explicitly.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(make_recipe(), tmp_path / "run", on_event=stop_twice, signals=StopSignals())
    finally:
        signal.signal(signal.SIGINT, before)
    assert CheckpointStore(tmp_path / "run/checkpoints").steps() == [4]


def test_trains_outside_the_main_thread(make_recipe, tmp_path: Path) -> None:
    thread = threading.Thread(target=train, args=(make_recipe(), tmp_path / "run"))
    thread.start()
    thread.join()
    assert len(step_losses(tmp_path / "run")) == 12


def times(outcome: Outcome, factor: float) -> Outcome:
    figures = {name: factor * figure for name, figure in outcome.figures.items()}
    return Outcome(factor * outcome.loss, outcome.count, figures)


def test_a_loss_that_stays_infinite_stops_the_run(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = TrainingStep.backward
    calls = 0

    def sometimes_infinite(self, *given):
        nonlocal calls
        calls += 1
        loss, counted = backward(self, *given)
        return loss * (float("inf") if calls == 3 or calls > 6 else 1.0), counted

    monkeypatch.setattr(TrainingStep, "backward", sometimes_infinite)
    with pytest.raises(
        WorkhorseError,
        match=r"for 3 steps in a row, up to step 9.*resume from the last checkpoint with --resume",
    ):
        train(make_recipe(max_bad_steps=3), tmp_path / "run")
    events = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [e["step"] for e in events if e["kind"] == "skipped_step"] == [3, 7, 8, 9]
    state = json.loads((tmp_path / "run/checkpoints/step-00000004/state.json").read_text())
    assert state["counters"]["skipped_steps"] == 1
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run", 8).values())


def test_a_run_that_diverges_before_its_first_checkpoint_names_none(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = NextToken.forward

    def infinite(self, rows):
        return times(loss(self, rows), float("inf"))

    monkeypatch.setattr(NextToken, "forward", infinite)
    with pytest.raises(WorkhorseError, match="no checkpoint has been saved yet: restart with a l"):
        train(make_recipe(max_bad_steps=2), tmp_path / "run")


def test_what_was_done_is_saved_when_something_else_fails(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make_recipe(eval_every=6), tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(Validator, "__call__", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(make_recipe(eval_every=6), tmp_path / "run")
    assert CheckpointStore(tmp_path / "run/checkpoints").steps() == [6, 4]
    train(make_recipe(eval_every=6), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_what_fails_inside_an_update_is_not_saved(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, calls = TrainingStep.update, []

    def failing(step: TrainingStep, *arguments: Any) -> Any:
        calls.append(step)
        return update(step, *arguments) if len(calls) < 7 else 1 / 0

    monkeypatch.setattr(TrainingStep, "update", failing)
    with pytest.raises(ZeroDivisionError):
        train(make_recipe(), tmp_path / "run")
    assert CheckpointStore(tmp_path / "run/checkpoints").steps() == [4]


def test_a_tracker_that_fails_is_left_out(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def track(event: dict[str, Any]) -> None:
        seen.append(event["step"])
        raise OSError("the network is down")

    monkeypatch.setattr("workhorse.run.build.open_tracker", lambda *_: track)
    monkeypatch.setattr("workhorse.run.check.check_tracker", lambda name: None)
    told: list[dict[str, Any]] = []
    result = train(make_recipe(trackers=["wandb"]), tmp_path / "run", on_event=told.append)
    assert result.step == 12
    assert len(seen) == 1
    assert notices(told)[-1].startswith(
        "the tracker wandb failed and is disabled: OSError('the network"
    )


def test_a_run_that_never_was_finite_ends_with_its_report(make_recipe, tmp_path: Path) -> None:
    optimizer = {"kind": "adamw", "learning_rate": 1e38}
    result = train(make_recipe(optimizer=optimizer, steps=8), tmp_path / "run")
    assert result.skipped_steps > 0
    assert result.validation_loss is None
    assert "not finite" in (tmp_path / "run/report.html").read_text()


def test_a_hang_up_saves_unless_it_is_ignored(make_recipe, tmp_path: Path) -> None:
    def hang_up(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 6:
            signal.raise_signal(signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        result = train(make_recipe(), tmp_path / "run", on_event=hang_up, signals=StopSignals())
        assert (result.stopped_by, result.step) == ("SIGHUP", 6)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
        assert (
            train(make_recipe(), tmp_path / "other", on_event=hang_up, signals=StopSignals()).step
            == 12
        )
    finally:
        signal.signal(signal.SIGHUP, before)


def test_documents_are_kept_apart(make_recipe, tmp_path: Path) -> None:
    fields = make_recipe(steps=2).to_dict()
    fields["data"]["packing"] = "documents"
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"text number {number}")
    fields["data"]["corpus"] = {"kind": "folder", "path": str(folder)}
    result = train(Recipe.from_dict(fields), tmp_path / "run")
    assert result.step == 2
    assert 0 < result.tokens < 2 * 4 * 16  # padding does not count


def test_tensorboard_gets_the_curves(make_recipe, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(make_recipe(steps=2, trackers=["tensorboard"]), tmp_path / "run")
    (file,) = (tmp_path / "run/tensorboard").iterdir()
    content = file.read_bytes()
    assert b"train/loss" in content
    assert b"validation/loss" in content


@pytest.mark.parametrize("eos", [False, True])
def test_validation_and_evaluation_differ_by_the_ends_of_documents(
    make_recipe, tmp_path: Path, eos: bool
) -> None:
    """For one document, in windows of the context, they differ in nothing else."""
    fields = make_recipe().to_dict()
    fields["data"]["eos"] = eos
    result = train(Recipe.from_dict(fields), tmp_path / "run")
    model = workhorse.load(tmp_path / "run", execution="reference")
    text = (tmp_path / "corpus.txt").read_text()
    held_out = text[int(0.9 * len(text)) :]
    found = evaluate(model.decoder, model.text, [Document("text", held_out)], start=None)
    nats = found.loss * found.tokens
    tokens = found.tokens
    if eos:
        last = model.text.encode(held_out)[found.tokens // 16 * 16 :]
        with torch.no_grad():
            logits = model.decoder(torch.tensor([last]))[0, -1]
        nats -= float(logits.log_softmax(-1)[model.text.eos_id])
        tokens += 1
    assert result.validation_loss == pytest.approx(nats / tokens, abs=1e-5)
    size = len(held_out.encode())
    bits = result.validation_loss / math.log(2) * (tokens + 1) / size  # the first is not predicted
    assert result.bits_per_byte == pytest.approx(bits)
    charged = found.loss * found.tokens + math.log(model.config.vocab_size)
    assert found.bits_per_byte == pytest.approx(charged / math.log(2) / size)
