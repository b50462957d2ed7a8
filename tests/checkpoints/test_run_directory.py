import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workhorse.checkpoints import (
    CheckpointStore,
    FolderLock,
    RunDirectory,
    load_weights,
    weights_of,
)
from workhorse.checkpoints.sizes import weights_on_disk
from workhorse.checkpoints.stored import TrainedModel, open_stored
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder, DecoderConfig
from workhorse.tokenizers import BytesConfig, train_tokenizer

CONFIG = DecoderConfig.from_dict(
    {
        "vocab_size": 11,
        "d_model": 16,
        "n_layers": 1,
        "max_seq_len": 8,
        "blocks": {
            "main": {
                "kind": "pre_norm",
                "norm": {"kind": "rms_norm"},
                "attention": {"kind": "attention", "n_heads": 2, "position": {"kind": "rope"}},
                "feed_forward": {"kind": "mlp", "d_ff": 32, "activation": "gelu"},
            }
        },
        "head": {"tied": True},
    }
)
TOKENS = torch.arange(8)[None]


@pytest.fixture
def decoder() -> Decoder:
    return CONFIG.build()


@pytest.fixture
def run(tmp_path: Path, decoder: Decoder) -> TrainedModel:
    """A run with two checkpoints; the newer one contains the decoder's weights."""
    run = TrainedModel(tmp_path / "run")
    run.path.mkdir()
    run.begin("name: run\n")
    run.save_config(CONFIG)
    state = {"config": CONFIG.to_dict()}
    run.store().save(1, weights_of(CONFIG.build()), {}, state)
    run.store().save(2, weights_of(decoder), {}, state)
    return run


def test_the_decoder_comes_back(run: TrainedModel, decoder: Decoder) -> None:
    loaded = run.load_decoder()
    torch.testing.assert_close(loaded(TOKENS), decoder.eval()(TOKENS))
    assert loaded.head.proj.weight is loaded.embedding.tokens.weight


def test_an_older_checkpoint_is_loaded_by_its_folder(
    run: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = run.store().path(1)
    weights, _ = run.store().load_model(1)
    for path in (older, Path(os.path.relpath(older)), Path()):
        monkeypatch.chdir(older if path == Path() else ".")
        stored = open_stored(path)
        assert stored.path.resolve() == run.path
        assert all(
            torch.equal(weight, weights[name])
            for name, weight in weights_of(stored.load_decoder()).items()
        )
    size = sum(weight.nbytes for weight in weights.values())
    assert {name: held.bytes for name, held in weights_on_disk(stored).items()} == {"float32": size}
    assert RunDirectory.at(run.path).step is None


def test_weights_come_in_the_type_asked_for(run: TrainedModel) -> None:
    loaded = run.load_decoder(dtype=torch.bfloat16)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}


def test_a_damaged_checkpoint_is_passed_over_with_a_remark(run: TrainedModel) -> None:
    os.truncate(run.store().path(2) / "model.safetensors", 100)
    loaded = run.load_decoder()
    (remark,) = run.remarks
    assert "skipping" in remark
    assert remark.endswith("; step 1 is used instead")
    assert "step-00000002: model.safetensors has 100 bytes" in remark
    torch.testing.assert_close(loaded(TOKENS), TrainedModel(run.path, 1).load_decoder()(TOKENS))
    with pytest.raises(WorkhorseError, match="is damaged"):
        TrainedModel(run.path, 2).load_decoder()


def test_a_run_that_saves_meanwhile_is_described_by_its_newer_checkpoint(
    run: TrainedModel, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CheckpointStore.steps

    def steps(store: CheckpointStore) -> list[int]:
        listed = real(store)
        monkeypatch.undo()
        run.store(keep=1).save(3, weights_of(decoder), {}, {"config": CONFIG.to_dict()})
        return listed

    size = sum(weight.nbytes for weight in weights_of(decoder).values())
    monkeypatch.setattr(CheckpointStore, "steps", steps)
    assert {name: held.bytes for name, held in weights_on_disk(run).items()} == {"float32": size}
    shutil.rmtree(run.checkpoints_folder)
    assert weights_on_disk(run) == {}


def test_a_config_of_another_model_is_refused(run: TrainedModel) -> None:
    run.save_config(CONFIG.replace(max_seq_len=16))
    with pytest.raises(
        WorkhorseError, match=r"were trained with another config than its config.json"
    ):
        run.load_decoder()


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(WorkhorseError, match=r"is not a run directory: it has no recipe.yaml"):
            TrainedModel(path).load_decoder()


def test_a_run_that_saved_nothing_yet(tmp_path: Path) -> None:
    run = TrainedModel(tmp_path)
    run.begin("name: run\n")
    with pytest.raises(WorkhorseError, match="because training stopped before the model was built"):
        run.load_decoder()
    run.save_config(CONFIG)
    with pytest.raises(WorkhorseError, match="has no complete checkpoint; train it with --resume"):
        run.load_decoder()
    run.metrics_file.write_text('{"kind": "checkpoint", "step": 3}\n')
    with pytest.raises(WorkhorseError, match="has no complete checkpoint; restore its checkpoints"):
        run.load_decoder()


def test_a_missing_step_names_those_that_are_there(run: TrainedModel) -> None:
    with pytest.raises(WorkhorseError, match=r"no checkpoint of step 7; it has \[2, 1\]"):
        TrainedModel(run.path, 7).load_decoder()


def test_a_damaged_config_is_named(run: TrainedModel) -> None:
    run.config_file.write_text("{")
    with pytest.raises(WorkhorseError, match=r"config.json is damaged"):
        _ = run.config


def test_weights_must_fit(decoder: Decoder) -> None:
    weights = {name: weight.clone() for name, weight in weights_of(decoder).items()}
    name = "embedding.tokens.weight"
    with pytest.raises(WorkhorseError, match=rf"only the run's config has '{name}'"):
        load_weights(decoder, {key: value for key, value in weights.items() if key != name})
    with pytest.raises(WorkhorseError, match="only the checkpoint has 'extra'"):
        load_weights(decoder, {**weights, "extra": torch.ones(1)})
    with pytest.raises(WorkhorseError, match=r"is \(3,\) in the checkpoint and \(11, 16\)"):
        load_weights(decoder, {**weights, name: torch.ones(3)})


def test_undo_leaves_other_peoples_files(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    (run.path / ".gitignore").write_text("*")
    with run.lock():
        run.begin("name: run\n")
        run.store().save(1, {}, {}, {})
        run.undo()
    assert [path.name for path in run.path.iterdir()] == [".gitignore"]


def test_a_lock_holds_when_its_file_was_removed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.lock():
        (run.path / ".lock").unlink()
        with pytest.raises(WorkhorseError, match="is in use by another training process"):
            RunDirectory(run.path).lock()


def test_a_recipe_that_is_none_is_named(run: TrainedModel) -> None:
    for content in (b"", b"\xff\xfe", b"[1, 2]", b"a: 1"):
        run.recipe_file.write_bytes(content)
        with pytest.raises(WorkhorseError, match=r"recipe.yaml.*; restore the recipe"):
            run.recipe()


def test_a_tokenizer_changed_in_a_run_is_noticed(run: TrainedModel) -> None:
    bytes_of, other = (
        train_tokenizer(BytesConfig(special={"eos": name}), []) for name in ("<a>", "<b>")
    )
    run.save_tokenizer(bytes_of)
    state = {"config": CONFIG.to_dict(), "tokenizer": bytes_of.fingerprint}
    run.store().save(3, weights_of(CONFIG.build()), {}, state)
    assert run.tokenizer().fingerprint == bytes_of.fingerprint
    shutil.rmtree(run.tokenizer_folder)
    run.save_tokenizer(other)
    with pytest.raises(WorkhorseError, match="is not the tokenizer that the checkpoints in"):
        run.tokenizer()


def test_a_lock_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for link in (Path.symlink_to, Path.hardlink_to):
        folder = tmp_path / link.__name__
        folder.mkdir()
        link(folder / ".lock", mine)
        with pytest.raises(
            WorkhorseError, match=r"\.lock is a link or not a regular file; remove it"
        ):
            FolderLock(folder)
    assert mine.read_text() == "mine"


HOLD = """
import fcntl, os, signal, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write(str(os.getpid()))
lock.flush()
print("held", flush=True)
signal.pause()
"""


def test_a_killed_process_lets_go_of_its_lock(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / ".lock"], stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        with pytest.raises(WorkhorseError, match=rf"in use by .* \(pid {process.pid}\)"):
            FolderLock(tmp_path)
        process.kill()
    with FolderLock(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkhorseError, match=r"cannot write in the run directory .*choose another"):
        RunDirectory(tmp_path / "file" / "run").lock()


def test_a_run_directory_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nothing")
    for out in (tmp_path / "link", tmp_path / "link" / "run"):
        with pytest.raises(WorkhorseError, match=r"(it|link) is a dangling link; choose another"):
            RunDirectory(out).lock()
