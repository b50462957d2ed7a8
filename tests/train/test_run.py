import errno
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from workhorse.checkpoints import CheckpointStore, Disk, RunDirectory
from workhorse.data import Batch, prepare, prepare_tokenizer
from workhorse.errors import WorkhorseError
from workhorse.train import Recipe, read_metrics, train
from workhorse.train.loop import Loop
from workhorse.train.step import LossOfBatch


def step_losses(out: Path) -> list[tuple[int, float]]:
    events = read_metrics(out / "metrics.jsonl")
    return [(event["step"], event["loss"]) for event in events if event["kind"] == "step"]


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return CheckpointStore(out / "checkpoints").load(step).model


def assert_same_run(one: Path, other: Path, step: int = 12) -> None:
    assert step_losses(one) == step_losses(other)
    first, second = weights(one, step), weights(other, step)
    assert all(torch.equal(first[name], second[name]) for name in first)


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
    run = RunDirectory(tmp_path / "run")
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


@pytest.mark.parametrize(
    "optimizer", [{"kind": "adamw"}, {"kind": "adamw", "mean_dtype": "bfloat16"}, {"kind": "muon"}]
)
def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    make_recipe, tmp_path: Path, optimizer: dict[str, str]
) -> None:
    fields = make_recipe(optimizer=optimizer, eval_every=4, keep=3).to_dict()
    fields["model"]["embedding"] = {"dropout": 0.2}  # random states matter
    recipe = Recipe.from_dict(fields)
    train(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-00000012")
    torch.manual_seed(12345)
    train(recipe, tmp_path / "resumed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    validations = [
        (event["step"], event["loss"])
        for out in ("whole", "resumed")
        for event in read_metrics(tmp_path / out / "metrics.jsonl")
        if event["kind"] == "validation"
    ]
    assert validations[:3] == validations[3:]
    optimizers = [
        (tmp_path / out / "checkpoints/step-00000012/optimizer.safetensors").read_bytes()
        for out in ("whole", "resumed")
    ]
    assert optimizers[0] == optimizers[1]


def test_a_bfloat16_run_saves_float32_weights_and_resumes_bit_for_bit(
    make_recipe, tmp_path: Path
) -> None:
    recipe = make_recipe(dtype="bfloat16", eval_every=4, keep=3, micro_batch_size=2)
    train(recipe, tmp_path / "whole")
    saved = weights(tmp_path / "whole", 12)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values())
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-00000012")
    train(recipe, tmp_path / "resumed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    optimizers = [
        (tmp_path / out / "checkpoints/step-00000012/optimizer.safetensors").read_bytes()
        for out in ("whole", "resumed")
    ]
    assert optimizers[0] == optimizers[1]


def test_on_cuda_batches_wait_in_pinned_memory(make_recipe, tmp_path: Path, monkeypatch) -> None:
    """Here with both played: a step that says it is on CUDA, and memory that is not pinned."""
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_was(
    make_recipe, tmp_path: Path, number: signal.Signals
) -> None:
    def stop_at_six(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 6:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    train(make_recipe(), tmp_path / "whole")
    result = train(make_recipe(), tmp_path / "run", on_event=stop_at_six)
    assert (result.stopped_by, result.step) == (number.name, 6)
    assert CheckpointStore(tmp_path / "run/checkpoints").steps() == [6, 4]
    assert signal.getsignal(number) == before
    train(make_recipe(), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_second_interrupt_acts_at_once(make_recipe, tmp_path: Path) -> None:
    def stop_twice(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 6:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    # A shell starts what runs in its background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(make_recipe(), tmp_path / "run", on_event=stop_twice)
    finally:
        signal.signal(signal.SIGINT, before)
    assert CheckpointStore(tmp_path / "run/checkpoints").steps() == [4]


def test_trains_outside_the_main_thread(make_recipe, tmp_path: Path) -> None:
    thread = threading.Thread(target=train, args=(make_recipe(), tmp_path / "run"))
    thread.start()
    thread.join()
    assert len(step_losses(tmp_path / "run")) == 12


def test_a_damaged_checkpoint_is_named_and_the_older_one_used(make_recipe, tmp_path: Path) -> None:
    train(make_recipe(), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    state = tmp_path / "run/checkpoints/step-00000012/state.json"
    state.write_text(state.read_text().replace("0", "1", 1))
    told: list[dict[str, Any]] = []
    train(make_recipe(), tmp_path / "run", resume=True, on_event=told.append)
    notices = [event["message"] for event in told if event["kind"] == "notice"]
    assert len(notices) == 1
    assert "step-00000012: state.json differs from its SHA-256" in notices[0]
    assert next(event["step"] for event in told if event["kind"] == "start") == 8
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_more_steps_go_on_from_the_end(make_recipe, tmp_path: Path) -> None:
    schedule = {"kind": "constant"}
    train(make_recipe(schedule=schedule), tmp_path / "run")
    told: list[dict[str, Any]] = []
    more = make_recipe(steps=16, schedule=schedule, log_every=2)
    result = train(more, tmp_path / "run", resume=True, on_event=told.append)
    assert result.step == 16
    notices = [event["message"] for event in told if event["kind"] == "notice"]
    assert notices == [
        "train.steps changes from 12 to 16",
        "train.log_every changes from 1 to 2",
    ]
    assert RunDirectory(tmp_path / "run").recipe()["train"]["steps"] == 16
    train(make_recipe(steps=16, schedule=schedule), tmp_path / "whole")
    first, second = weights(tmp_path / "run", 16), weights(tmp_path / "whole", 16)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("train", "batch_size", 8, "train.batch_size changes from 4 to 8"),
        ("train", "seed", 3, "train.seed changes from 0 to 3"),
        ("train", "optimizer", {"kind": "adamw"}, "train.optimizer.kind changes from 'muon'"),
        ("model", "n_layers", 3, "model.n_layers changes from 2 to 3"),
        ("data", "packing", "documents", "data.packing changes from 'windows' to 'documents'"),
    ],
)
def test_another_run_under_the_same_name_is_refused(
    make_recipe, tmp_path: Path, *, section: str, key: str, value: Any, named: str
) -> None:
    train(make_recipe(), tmp_path / "run")
    fields = make_recipe().to_dict()
    fields[section][key] = value
    with pytest.raises(WorkhorseError, match=named):
        train(Recipe.from_dict(fields), tmp_path / "run", resume=True)


def test_changed_text_is_refused(make_recipe, corpus: Path, tmp_path: Path) -> None:
    train(make_recipe(), tmp_path / "run")
    corpus.write_text(corpus.read_text().replace("and", "or"))
    with pytest.raises(WorkhorseError, match="the data is not what the checkpoint of step 12"):
        train(make_recipe(), tmp_path / "run", resume=True)


def test_an_existing_run_is_not_overwritten(make_recipe, tmp_path: Path) -> None:
    train(make_recipe(), tmp_path / "run")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(WorkhorseError, match="holds a run already; go on with it by --resume"):
        train(make_recipe(), tmp_path / "run")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_other_folders_are_not_written_into(make_recipe, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("mine")
    with pytest.raises(WorkhorseError, match=r"not empty and not a run \(it has 'chapter.txt'\)"):
        train(make_recipe(), tmp_path / "thesis")
    with pytest.raises(WorkhorseError, match="holds no run to resume"):
        train(make_recipe(), tmp_path / "thesis", resume=True)
    with pytest.raises(WorkhorseError, match="holds no run to resume"):
        train(make_recipe(), tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WorkhorseError, match="it is a file"):
        train(make_recipe(), tmp_path / "file")


def test_a_run_that_cannot_begin_leaves_nothing(make_recipe, corpus: Path, tmp_path: Path) -> None:
    corpus.write_text("short")
    with pytest.raises(WorkhorseError):
        train(make_recipe(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_in_use_is_not_trained_twice(make_recipe, tmp_path: Path) -> None:
    def again(event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            train(make_recipe(), tmp_path / "run", resume=True)

    with pytest.raises(WorkhorseError, match=f"in use by another .* \\(pid {os.getpid()}\\)"):
        train(make_recipe(), tmp_path / "run", on_event=again)


def test_a_loss_that_stays_infinite_stops_the_run(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = LossOfBatch.forward
    calls = 0

    def sometimes_infinite(self, *rows):
        nonlocal calls
        calls += 1
        total, counted = loss(self, *rows)
        return (total * float("inf") if calls == 3 or calls > 6 else total), counted

    monkeypatch.setattr(LossOfBatch, "forward", sometimes_infinite)
    with pytest.raises(WorkhorseError, match="not finite for 3 steps in a row, up to step 9"):
        train(make_recipe(max_bad_steps=3), tmp_path / "run")
    events = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [e["step"] for e in events if e["kind"] == "skipped_step"] == [3, 7, 8, 9]
    state = json.loads((tmp_path / "run/checkpoints/step-00000004/state.json").read_text())
    assert state["counters"]["skipped_steps"] == 1
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run", 8).values())


class FullDisk(Disk):
    """Has room for one checkpoint."""

    def __init__(self) -> None:
        self.writes = 0

    def write_tensors(self, path: Path, tensors: Any) -> None:
        self.writes += 1
        if self.writes == 4:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().write_tensors(path, tensors)


def test_a_full_disk_leaves_the_last_checkpoint_whole(make_recipe, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(make_recipe(), tmp_path / "whole")
    store = CheckpointStore(out / "checkpoints", disk=FullDisk())
    with pytest.raises(
        WorkhorseError, match=r"step-00000008: No space left.*step-00000004 is whole"
    ):
        train(make_recipe(), out, store=store)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000004"]
    train(make_recipe(), out, resume=True)
    assert_same_run(tmp_path / "whole", out)


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


def test_a_tracker_that_is_not_installed_is_named(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(
        WorkhorseError, match="the tracker wandb is not installed; pip install wandb"
    ):
        train(make_recipe(trackers=["wandb"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:7"}, "device=cuda:7 is not there"),
        ({"device": "gpu"}, "device=gpu is not a device; choose cpu"),
    ],
)
def test_a_device_that_is_not_there(make_recipe, tmp_path: Path, changes, message: str) -> None:
    with pytest.raises(WorkhorseError, match=message):
        train(make_recipe(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_prepared_shards_are_used_and_survive_a_run_that_cannot_begin(
    make_recipe, tmp_path: Path
) -> None:
    recipe = make_recipe()
    data = tmp_path / "run" / "data"
    prepare(recipe.data, prepare_tokenizer(recipe.tokenizer, recipe.data, data), data)
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*.npy")}
    with pytest.raises(WorkhorseError):
        train(make_recipe(seq_len=10**6), tmp_path / "run")
    train(recipe, tmp_path / "run")
    assert before == {path: path.stat().st_mtime_ns for path in data.rglob("*.npy")}


def test_a_kernel_that_cannot_train_here_is_refused_before_anything_is_made(
    make_recipe, tmp_path: Path
) -> None:
    with pytest.raises(WorkhorseError, match=r"^kernel=flex has no backward on a CPU; train with"):
        train(make_recipe(kernel="flex", device="cpu"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_refused_run_touches_nothing_of_others_and_leaves_no_folder(
    make_recipe, corpus: Path, tmp_path: Path
) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter.txt").write_text("mine")
    with pytest.raises(WorkhorseError, match="is not empty and not a run"):
        train(make_recipe(), thesis)
    assert [path.name for path in thesis.iterdir()] == ["chapter.txt"]
    (tmp_path / "mine").mkdir()
    corpus.write_text("short")
    for out in (tmp_path / "runs" / "new", tmp_path / "mine"):
        with pytest.raises(WorkhorseError, match="fewer than one window"):
            train(make_recipe(), out)
    assert not (tmp_path / "runs").exists()
    assert not any((tmp_path / "mine").iterdir())
