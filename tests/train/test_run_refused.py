"""Invalid runs fail with a one-line error, and no existing file is changed."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from workhorse.data import DataConfig, prepare, prepare_tokenizer
from workhorse.errors import WorkhorseError
from workhorse.memory.capacity import check_held
from workhorse.memory.step_memory import PlannedStep
from workhorse.run import check_run, estimate, train
from workhorse.run.check import own_gpu
from workhorse.train import Recipe


def times(out: Path) -> dict[Path, int]:
    """Return the modification time of each file of a run, except the lock."""
    return {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"}


def test_an_existing_run_is_not_overwritten(make_recipe, tmp_path: Path) -> None:
    train(make_recipe(), tmp_path / "run")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(WorkhorseError, match="already contains a run; resume it with --resume"):
        train(make_recipe(), tmp_path / "run")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_other_folders_are_not_written_into(make_recipe, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("mine")
    with pytest.raises(
        WorkhorseError, match=r"not empty and not a run \(it contains 'chapter.txt'\)"
    ):
        train(make_recipe(), tmp_path / "thesis")
    with pytest.raises(WorkhorseError, match="contains no run to resume"):
        train(make_recipe(), tmp_path / "thesis", resume=True)
    with pytest.raises(WorkhorseError, match="contains no run to resume"):
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


def test_a_training_that_does_not_fit_is_refused_and_leaves_nothing(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workhorse.devices.memory.free_memory", lambda *_, **__: 1000)
    line = r"the model with its gradients and optimizer state needs .* MiB are free on cpu; use a"
    with pytest.raises(WorkhorseError, match=line):
        train(make_recipe(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("workhorse.parallel.processes.environment.count_here", lambda: 3)
    line = r"state in 3 processes needs .*; start fewer processes, shard the weights with parallel."
    recipe = make_recipe()
    with pytest.raises(WorkhorseError, match=line):
        check_held(PlannedStep(recipe.decoder_config(257), recipe.train, torch.device("cpu")))


def test_a_run_in_use_is_not_trained_twice(make_recipe, tmp_path: Path) -> None:
    def again(event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            train(make_recipe(), tmp_path / "run", resume=True)

    with pytest.raises(WorkhorseError, match=f"in use by another .* \\(pid {os.getpid()}\\)"):
        train(make_recipe(), tmp_path / "run", on_event=again)


def test_a_tracker_that_is_not_installed_is_named(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        WorkhorseError, match="the tracker wandb is not installed; pip install wandb"
    ):
        train(make_recipe(trackers=["wandb"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:7"}, "device=cuda:7 is not available"),
        ({"device": "gpu"}, "device=gpu is not a device; choose cpu"),
    ],
)
def test_a_device_that_is_not_there(make_recipe, tmp_path: Path, changes, message: str) -> None:
    with pytest.raises(WorkhorseError, match=message):
        train(make_recipe(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_float8_on_a_cpu_is_refused(make_recipe, tmp_path) -> None:
    with pytest.raises(
        WorkhorseError, match=r"train.fp8=true needs CUDA, and the device is cpu; remove"
    ):
        train(make_recipe(fp8=True, dtype="bfloat16"), tmp_path / "run")
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


def test_a_sample_prompt_longer_than_the_context_is_refused_at_once(
    make_recipe, tmp_path: Path
) -> None:
    samples = {"every": 1000, "prompts": ["short", "much longer than sixteen bytes"]}
    with pytest.raises(WorkhorseError, match="has 30 tokens, but the context is 16; shorten it"):
        train(make_recipe(samples=samples), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lost", ["optimizer.safetensors", "model.safetensors"])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(
    make_recipe, tmp_path: Path, lost: str
) -> None:
    train(make_recipe(), tmp_path / "run")
    for file in (tmp_path / "run/checkpoints").glob(f"*/{lost}"):
        file.unlink()
    before = times(tmp_path / "run")
    remedy = "start a new run with another --out"
    if lost.startswith("optimizer"):
        remedy = "start a new run from the weights of step 12, which are intact: workhorse train "
    with pytest.raises(WorkhorseError, match=f"is intact .*{lost}: No such .*{remedy}"):
        train(make_recipe(), tmp_path / "run", resume=True)
    assert times(tmp_path / "run") == before
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(WorkhorseError, match=r"lists a checkpoint of step 12, but .* has none"):
        train(make_recipe(), tmp_path / "run", resume=True)


def test_links_in_a_run_directory_are_not_written_through(make_recipe, tmp_path: Path) -> None:
    out, mine = tmp_path / "run", tmp_path / "mine"
    out.mkdir()
    mine.write_text("mine")
    for name in (".tmp-recipe.yaml", ".tmp-report.html", ".tmp-metrics.jsonl", ".tmp-config.json"):
        (out / name).symlink_to(mine)
    (out / ".tmp-tokenizer").symlink_to(tmp_path)
    train(make_recipe(), out)
    assert mine.read_text() == "mine"
    assert not (tmp_path / "tokenizer.json").exists()


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


def test_a_model_that_memory_cannot_hold_leaves_nothing(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("workhorse.run.run.plan_run", refuse)
    with pytest.raises(MemoryError):
        train(make_recipe(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_inside_its_own_corpus_is_refused(make_recipe, tmp_path: Path) -> None:
    """A run's files would become documents of the corpus, so it would differ at every resume."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text("some text " * 20)
    corpus = {"kind": "folder", "path": str(texts)}

    def over(corpus: dict[str, str]) -> Recipe:
        return make_recipe().replace(data=DataConfig.from_dict({"corpus": corpus}))

    inside = texts / "runs" / "mine"
    with pytest.raises(
        WorkhorseError, match=r"mine is inside the corpus .*texts, .* another --out"
    ):
        train(over(corpus), inside)
    assert not (texts / "runs").exists()
    narrow = over(corpus | {"glob": "**/*.txt"})
    train(narrow, inside)
    train(narrow, inside, resume=True)


def test_a_run_without_its_recipe_is_told_apart_from_no_run(make_recipe, tmp_path: Path) -> None:
    train(make_recipe(), tmp_path / "run")
    (tmp_path / "run/recipe.yaml").unlink()
    with pytest.raises(WorkhorseError, match=r"restore its recipe\.yaml, which is missing"):
        train(make_recipe(), tmp_path / "run", resume=True)


@pytest.mark.parametrize("recipe", [None, 5, "r.yaml", [], {}, Path("r.yaml")])
@pytest.mark.parametrize("use", [train, check_run, estimate])
def test_what_is_no_recipe(use: Any, recipe: Any, tmp_path: Path) -> None:
    places = () if use is estimate else (tmp_path / "run",)
    with pytest.raises(WorkhorseError, match=r"^recipe must be a Recipe, not .*; load one from a"):
        use(recipe, *places)
    assert list(tmp_path.iterdir()) == []


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(WorkhorseError, match="2 processes on this machine need a GPU each"):
        own_gpu(torch.device("cuda"), 2)
    for other in (torch.device("cpu"), torch.device("cuda:1")):
        assert own_gpu(other, 2) == other


def test_each_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_gpu(torch.device("cuda"), 2) == torch.device("cuda:1")
    assert taken == [1]
