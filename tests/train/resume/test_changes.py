"""Resuming a run with a changed recipe: the change is recorded, or an error names the command."""

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import notices, step_losses, weights
from workhorse.checkpoints import Places, RunDirectory, load_weights
from workhorse.cli.main import main
from workhorse.data import Batches, DataConfig, prepare
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder
from workhorse.run import check_run, train
from workhorse.tokenizers import BytesConfig, train_tokenizer
from workhorse.train import Recipe, read_metrics, with_init


def recorded(out: Path) -> list[tuple[int, str, Any, Any]]:
    return [
        (event["step"], event["setting"], event["before"], event["now"])
        for event in read_metrics(out / "metrics.jsonl")
        if event["kind"] == "change"
    ]


def changed(recipe: Recipe, *path: str, to: Any) -> Recipe:
    fields = recipe.to_dict()
    section = fields
    for name in path[:-1]:
        section = section[name]
    section[path[-1]] = to
    return Recipe.from_dict(fields)


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file except the shards, which are a cache."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and "data" not in file.relative_to(folder).parts
    }


@pytest.fixture
def run(make_recipe, tmp_path: Path) -> Path:
    train(make_recipe(), tmp_path / "run")
    return tmp_path / "run"


def test_what_may_change_goes_on_and_is_recorded(make_recipe, run: Path) -> None:
    told: list[dict[str, Any]] = []
    optimizer = {"kind": "muon", "learning_rate": 5e-4}
    again = make_recipe(steps=16, grad_clip=0.5, optimizer=optimizer, objective={"z_loss": 1e-4})
    train(again, run, resume=True, on_event=told.append)
    assert recorded(run) == [
        (12, "train.steps", 12, 16),
        (12, "train.objective.z_loss", 0.0, 1e-4),
        (12, "train.optimizer.learning_rate", 1e-3, 5e-4),
        (12, "train.grad_clip", 1.0, 0.5),
    ]
    assert "train.grad_clip changes from 1.0 to 0.5" in notices(told)
    rates = {e["step"]: e["learning_rate"] for e in told if e["kind"] == "step"}
    schedule = again.train.schedule
    assert rates[13] == 5e-4 * schedule.factor(12, 16)
    page = (run / "report.html").read_text()
    assert "from step 13, train.optimizer.learning_rate is 0.0005 instead of 0.001" in page
    train(again, run, resume=True)
    assert len(recorded(run)) == 4


def test_a_change_survives_a_kill_before_the_next_checkpoint(make_recipe, run: Path) -> None:
    def die(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 14:
            raise KeyboardInterrupt

    more = make_recipe(steps=16, grad_clip=0.5)
    shutil.copytree(run, run.with_name("whole"))
    train(more, run.with_name("whole"), resume=True)
    with pytest.raises(KeyboardInterrupt):
        train(more, run, resume=True, on_event=die)
    train(more, run, resume=True)
    assert recorded(run) == recorded(run.with_name("whole"))
    first, second = weights(run, 16), weights(run.with_name("whole"), 16)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_batch_size_goes_on_with_the_rows_that_come_next(
    make_recipe, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def note(batches: Batches, step: int) -> Any:
        first = batches.offset + step * batches.batch_size
        read.extend(range(first, first + batches.batch_size))
        return plain(batches, step)

    plain = Batches.__getitem__
    monkeypatch.setattr(Batches, "__getitem__", note)
    train(make_recipe(steps=14, batch_size=6), run, resume=True)
    assert read == list(range(12 * 4, 12 * 4 + 2 * 6))
    read.clear()
    train(make_recipe(steps=16, batch_size=3), run, resume=True)
    assert read == list(range(12 * 4 + 2 * 6, 12 * 4 + 2 * 6 + 2 * 3))


def test_rows_with_an_offset_are_the_same_rows(corpus: Path, tmp_path: Path) -> None:
    data = DataConfig.from_dict({"corpus": {"kind": "text", "path": str(corpus)}})
    split = prepare(data, train_tokenizer(BytesConfig(), []), tmp_path / "data").train
    small = Batches(split, seq_len=8, batch_size=2, seed=1)
    large = Batches(split, seq_len=8, batch_size=4, seed=1, offset=10 - 5 * 4)
    assert torch.equal(large[5].tokens[:2], small[5].tokens)
    assert torch.equal(large[5].tokens[2:], small[6].tokens)


def test_another_rate_of_muon_says_which_rate_stays(make_recipe, run: Path) -> None:
    def told(**optimizer: Any) -> list[str]:
        recipe = make_recipe(steps=24, optimizer={"kind": "muon", **optimizer})
        return check_run(recipe, run, resume=True).notices

    stays = "embeddings, head and norms keep train.optimizer.adamw.learning_rate="
    assert [line for line in told(learning_rate=0.004) if stays in line]
    both = told(learning_rate=0.004, adamw={"learning_rate": 0.004})
    assert not [line for line in [*both, *told()] if stays in line]


def test_more_steps_say_what_becomes_of_the_rate(make_recipe, run: Path) -> None:
    at = check_run(make_recipe(steps=24), run, resume=True)
    changes = "the learning rate changes from"
    (line,) = [line for line in at.notices if line.startswith(changes)]
    assert line.startswith(f"{changes} 0.000115 at step 12 to 0.00055 at step 13; to keep it, ")
    settings = dict(word.split("=") for word in line.split("to keep it, set ")[1].split())
    assert settings["train.schedule"] == "constant"
    assert settings["train.optimizer.adamw.learning_rate"] == "0.000115"


@pytest.mark.parametrize(
    ("path", "value", "begins"),
    [
        (("train", "seed"), 3, "start a new run: "),
        (("model", "n_layers"), 3, "start a new run: "),
        (("tokenizer", "special", "eos"), "<x>", "start a new run: "),
        (("train", "seq_len"), 8, "its weights: "),
        (("train", "optimizer"), {"kind": "adamw"}, "its weights: "),
        (("data", "packing"), "documents", "its weights: "),
        (("model", "embedding"), {"dropout": 0.5}, "its weights: "),
    ],
)
def test_the_command_for_what_needs_a_new_run_begins_it(
    make_recipe, run: Path, path: tuple[str, ...], value: Any, begins: str
) -> None:
    before = contents(run)
    with pytest.raises(WorkhorseError, match="which needs a new run; resume it unch") as refused:
        train(changed(make_recipe(log_every=5), *path, to=value), run, resume=True)
    assert contents(run) == before
    command = shlex.split(str(refused.value).split(begins)[1].split(" (add")[0])
    assert command[:3] == ["workhorse", "train", str(run)]
    assert main([*command[1:], "train.steps=1"]) == 0
    new = RunDirectory(run.with_name("run-2"))
    section = new.recipe()
    for name in path[:-1]:
        section = section[name]
    assert section[path[-1]] == value or section[path[-1]].items() >= value.items()
    assert new.recipe()["train"]["log_every"] == 5
    starts_from_weights = begins == "its weights: "
    assert (new.recipe()["init"] == str(run)) == starts_from_weights
    if starts_from_weights and path[0] != "train":
        start, trained = weights(new.path, 1), weights(run, 12)
        name = "layers.0.feed_forward.down_proj.weight"
        assert (start[name] - trained[name]).abs().max() < 0.01


def test_a_run_takes_over_an_optimizer(make_recipe, run: Path, tmp_path: Path) -> None:
    fields = make_recipe(steps=1).to_dict()
    still = {"kind": "muon", "momentum": 0.5, "learning_rate": 1e-9, "adamw": {"kind": "adamw"}}
    fields["train"]["optimizer"] = still
    fields = with_init(fields | {"init": str(run), "init_optimizer": True})
    train(Recipe.from_dict(fields), tmp_path / "warm")
    train(Recipe.from_dict(fields | {"init_optimizer": False}), tmp_path / "cold")
    counts = [
        RunDirectory(out).store().newest().optimizer["embedding.tokens.weight.updates"].item()
        for out in (run, tmp_path / "warm", tmp_path / "cold")
    ]
    assert counts == [12, 13, 1]
    fields["train"]["optimizer"] = {"kind": "adamw"}
    with pytest.raises(
        WorkhorseError,
        match=r"has the optimizer state of muon, not of adamw; set init_optimizer=false, or",
    ):
        train(Recipe.from_dict(fields), tmp_path / "other")
    with pytest.raises(
        WorkhorseError, match="init_optimizer=true needs init, which is not set; set init to a run"
    ):
        Recipe.from_dict(fields | {"init": None})


def test_weights_and_optimizer_are_of_one_checkpoint(
    make_recipe, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source run saves another checkpoint between the two reads."""
    store = RunDirectory(run).store()
    trained = store.newest()

    def load_and_save(decoder: Decoder, given: dict[str, torch.Tensor], places: Places) -> None:
        load_weights(decoder, given, places)
        if decoder.embedding.tokens.weight.is_meta:  # this call only checks shapes
            return
        weights = {name: torch.zeros_like(tensor) for name, tensor in trained.model.items()}
        state = {name: torch.full_like(tensor, 99) for name, tensor in trained.optimizer.items()}
        store.save(13, weights, state, trained.state)

    monkeypatch.setattr("workhorse.run.init_from.load_weights", load_and_save)
    fields = make_recipe(steps=1).to_dict() | {"init": str(run), "init_optimizer": True}
    kind = trained.state["recipe"]["train"]["optimizer"]
    fields["train"]["optimizer"] = kind | {"learning_rate": 1e-9, "weight_decay": 0.0}
    train(Recipe.from_dict(with_init(fields)), tmp_path / "warm")
    assert store.newest().step == 13
    begun = RunDirectory(tmp_path / "warm").store().newest()
    name = "layers.0.feed_forward.down_proj.weight"
    torch.testing.assert_close(begun.model[name], trained.model[name])
    assert begun.optimizer["final_norm.weight.updates"].item() == 13


def test_files_that_came_went_or_changed_are_named(make_recipe, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"text number {number}, and more of it")
    recipe = changed(make_recipe(), "data", "corpus", to={"kind": "folder", "path": str(texts)})
    train(recipe, tmp_path / "run")
    before = contents(tmp_path / "run")
    (texts / "new.txt").write_text("a file added")
    (texts / "7.txt").unlink()
    (texts / "8.txt").write_text("shorter")
    shards = len(list((tmp_path / "run/data").iterdir()))
    with pytest.raises(
        WorkhorseError,
        match=r"trained with \(added new.txt; missing 7.txt; changed 8.txt\); restore it, or",
    ):
        train(recipe, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before
    assert len(list((tmp_path / "run/data").iterdir())) == shards
    other = changed(recipe, "data", "corpus", "glob", to="**/*.txt")
    with pytest.raises(WorkhorseError, match="the data differs from the data that") as refused:
        train(other, tmp_path / "run", resume=True)
    assert " 'data.corpus.glob=**/*.txt'" in str(refused.value)
    os.utime(texts / "9.txt", ns=(0, 0))  # same contents, so it is not listed as changed
    (texts / "8.txt").write_text("text number 8, and more of it")
    with pytest.raises(WorkhorseError, match=r"with \(added new.txt; missing 7.txt\); restore it"):
        train(recipe, tmp_path / "run", resume=True)
    (listed,) = (tmp_path / "run/data").glob("*/files.json")
    listed.unlink()
    os.mkfifo(listed)  # a FIFO without a writer must not block
    with pytest.raises(WorkhorseError, match="the data differs from the data that the checkpoint"):
        train(recipe, tmp_path / "run", resume=True)


def test_a_corpus_may_lie_elsewhere_with_the_same_text(
    make_recipe, corpus: Path, run: Path, tmp_path: Path
) -> None:
    moved = corpus.rename(tmp_path / "moved.txt")
    recipe = changed(make_recipe(steps=13), "data", "corpus", "path", to=str(moved))
    assert train(recipe, run, resume=True).step == 13
    assert (12, "data.corpus.path", str(corpus), str(moved)) in recorded(run)
    text = moved.read_text()
    moved.write_text(text.replace("1", "2"))
    os.utime(moved, ns=(0, 0))
    with pytest.raises(WorkhorseError, match=r"step 13 was trained with \(perhaps changed .*moved"):
        train(recipe, run, resume=True)


def test_fewer_steps_than_are_done_are_refused(make_recipe, run: Path) -> None:
    with pytest.raises(WorkhorseError, match=r"has done 12 steps, more than train.steps=6; set "):
        train(make_recipe(steps=6), run, resume=True)
    assert train(make_recipe(), run, resume=True).step == 12
    newest = max((run / "checkpoints").glob("step-*"))
    (newest / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(WorkhorseError, match=rf"has done \d+ steps \(.*{newest.name}.*\), more"):
        train(make_recipe(steps=2), run, resume=True)


def test_a_run_that_started_from_a_model_needs_it_no_more(
    make_recipe, run: Path, tmp_path: Path
) -> None:
    fields = make_recipe(steps=2, checkpoint_every=1).to_dict()
    del fields["tokenizer"]
    fields |= {"init": str(run), "model": {"embedding": {"dropout": 0.1}}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(str(fields).replace("None", "null").replace("True", "true"), "utf-8")
    tuned = tmp_path / "tuned"
    assert main(["train", str(recipe), "--out", str(tuned)]) == 0
    shutil.rmtree(run)
    assert main(["train", str(recipe), "train.steps=3", "--resume", "--out", str(tuned)]) == 0
    assert main(["train", str(tuned), "train.steps=4", "--resume"]) == 0
    assert [step for step, _ in step_losses(tuned)] == [1, 2, 3, 4]
