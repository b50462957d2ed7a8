"""Operations that save while file-system calls fail, and checks of the saved files."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

import workhorse
from workhorse.checkpoints import CheckpointStore, RunDirectory
from workhorse.cli.main import main
from workhorse.data import preparation
from workhorse.data.dataset import open_dataset
from workhorse.errors import WorkhorseError
from workhorse.model.convert import Format
from workhorse.model.convert import convert as convert_model
from workhorse.nn import DecoderConfig
from workhorse.tokenizers import BytesConfig, SpecialTokensConfig, load_tokenizer, train_tokenizer

BLOCK = {
    "kind": "pre_norm",
    "norm": {"kind": "rms_norm"},
    "attention": {"kind": "attention", "n_heads": 2, "position": {"kind": "rope"}},
    "feed_forward": {"kind": "gated_mlp", "d_ff": 64, "activation": "silu"},
}
MODEL = {"d_model": 32, "n_layers": 1, "max_seq_len": 32, "blocks": {"main": BLOCK}}
MODEL["final_norm"] = {"kind": "rms_norm"}


class Operation(NamedTuple):
    """An operation that saves in a folder; calls outside the folder never fail."""

    begin: Callable[[Path], object]
    """Creates the initial content of the folder."""
    act: Callable[[Path], int]
    """Saves, and returns the exit status."""
    check: Callable[[Path, bool], object]
    """Asserts that nothing saved is lost; if True is passed, also that the new save is there."""
    again: Callable[[Path], int]
    """Saves again without failures, and returns the exit status."""


def tokenizer(eos: str):
    special = SpecialTokensConfig(bos=None, eos=eos, pad=None, chat=())
    return train_tokenizer(BytesConfig(special=special), [])


def files(folder: Path) -> dict[str, bytes]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


# A checkpoint that replaces an older one.
def store(base: Path) -> CheckpointStore:
    return CheckpointStore(base / "checkpoints", keep=2)


def save_step(base: Path, step: int) -> int:
    tensors = {name: torch.full((3, 5), float(step)) for name in ("a", "b")}
    store(base).save(step, tensors, tensors, {"step": step})
    return 0


def check_steps(base: Path, saved: bool, new: int = 3) -> None:
    steps = store(base).steps()
    for step in steps:
        assert store(base).load(step).model["b"].eq(step).all()
    assert 2 in steps or steps[0] > new, steps
    assert not saved or steps[0] >= new, steps
    assert len(steps) >= 2, steps


def damaged(base: Path) -> None:
    for step in (1, 2, 3):
        save_step(base, step)
    save_step(base, 1)
    (store(base).path(3) / "state.json").write_text("{}")
    shutil.copytree(store(base).path(2), base / "checkpoints" / ".tmp-step-00000003")


def save_over_damaged(base: Path) -> int:
    kept = store(base)
    if kept.newest() is None:
        raise WorkhorseError("no checkpoint can be read")
    tensors = {name: torch.full((3, 5), 3.0) for name in ("a", "b")}
    kept.save(3, tensors, tensors, {"step": 3})
    return 0


def check_undamaged(base: Path, saved: bool) -> None:
    skipped: list[str] = []
    found = store(base).newest(skipped.append)
    assert found is not None, skipped
    assert found.model["b"].eq(found.step).all()
    assert found.step >= (3 if saved else 2)


# A model next to another one.
def source(base: Path) -> Path:
    """A model in our own format, next to the folder in which calls fail."""
    made = base.parent / "source"
    if not made.exists():
        tokens = tokenizer("<|eos|>")
        config = DecoderConfig.from_dict({**MODEL, "vocab_size": tokens.vocab_size})
        workhorse.save(config.build(), made, tokenizer=tokens)
    return made


def convert(to: Format, target: str) -> Callable[[Path], int]:
    return lambda base: main(["convert", str(source(base)), str(base / target), "--to", to])


def unless_there(target: str, act: Callable[[Path], int]) -> Callable[[Path], int]:
    """Skip the second save if the first wrote the output, which is never overwritten."""

    def again(base: Path) -> int:
        there = base / target
        taken = there.exists() and (there.is_file() or any(there.iterdir()))
        return 0 if taken else act(base)

    return again


def written(to: Format, target: str, begin: Callable[[Path], object]) -> Operation:
    def begin_(base: Path) -> None:
        convert_model(source(base), base.parent / target, to)
        convert_model(source(base), base / "old", "workhorse")
        begin(base)

    def check(base: Path, saved: bool) -> None:
        assert files(base / "old") == files(source(base))
        new, whole = base / target, base.parent / target
        if saved or (new.exists() and (new.is_file() or any(new.iterdir()))):
            same = new.read_bytes() == whole.read_bytes() if new.is_file() else None
            assert same or files(new) == files(whole)

    act = convert(to, target)
    return Operation(begin_, act, check, unless_there(target, act))


def save_model(base: Path) -> int:
    workhorse.save(workhorse.load(source(base)), base / "out")
    return 0


# A tokenizer that replaces another one.
def save_tokenizer(base: Path) -> int:
    tokenizer("<|new|>").save(base / "tokenizer")
    return 0


def check_tokenizer(base: Path, saved: bool) -> None:
    wanted = ["<|new|>"] if saved else ["<|new|>", "<|old|>"]
    if saved or (base / "tokenizer").exists():
        read = load_tokenizer(base / "tokenizer")
        assert read.roles["eos"] in wanted, read.roles
        assert set(read.special_tokens) == {read.roles["eos"]}, (read.special_tokens, read.roles)


# Token shards, and a run.
def recipe(base: Path, **train: object) -> str:
    words = base.parent / "words.txt"
    if not words.exists():
        words.write_text("one two three four\n" * 200)
    preparation.SHARD_TOKENS = 1000
    made = {
        "name": "x",
        "model": MODEL,
        "tokenizer": {"kind": "bytes"},
        "data": {"corpus": {"kind": "text", "path": str(words)}},
        "train": {"batch_size": 2, "seq_len": 16, "checkpoint_every": 2, "eval_every": 2, **train},
    }
    made["train"].update({"eval_batches": 1, "keep": 2})
    (base.parent / "recipe.yaml").write_text(yaml.safe_dump(made))
    return str(base.parent / "recipe.yaml")


def prepare(base: Path) -> int:
    return main(["data", "prepare", recipe(base, steps=4), "--out", str(base / "run")])


def check_data(base: Path, saved: bool) -> None:
    for folder in (base / "run" / "data").glob("????????????????") if saved else ():
        found = open_dataset(folder, {"corpus": 1.0})
        found.verify()
        assert found.manifest.complete


def train(steps: int, *words: str) -> Callable[[Path], int]:
    def act(base: Path) -> int:
        out = ["--out", str(base / "run")]
        more = ["--resume"] if (base / "run" / "recipe.yaml").exists() else []
        return main(["train", recipe(base, steps=4), f"train.steps={steps}", *out, *more, *words])

    return act


def check_run(base: Path, saved: bool) -> None:
    run = RunDirectory(base / "run")
    steps = run.store().steps()
    assert len(steps) >= 2, steps
    for step in steps:
        run.store().check(step)
    assert (run.store().newest_weights() or 0) >= (8 if saved else 4)
    workhorse.load(run.path)


OPERATIONS = {
    "checkpoint": Operation(
        lambda base: [save_step(base, step) for step in (1, 2)],
        lambda base: save_step(base, 3),
        check_steps,
        lambda base: save_step(base, 4),
    ),
    "checkpoint over a damaged one": Operation(
        damaged, save_over_damaged, check_undamaged, save_over_damaged
    ),
    "to hf": written("hf", "out", lambda base: (base / "out").mkdir()),
    "to gguf": written("gguf", "out.gguf", lambda base: None),
    "to workhorse": written("workhorse", "out", lambda base: None),
    "save": written("workhorse", "out", lambda base: None)._replace(
        act=save_model, again=unless_there("out", save_model)
    ),
    "tokenizer": Operation(lambda base: None, save_tokenizer, check_tokenizer, save_tokenizer),
    "tokenizer over another": Operation(
        lambda base: tokenizer("<|old|>").save(base / "tokenizer"),
        save_tokenizer,
        check_tokenizer,
        save_tokenizer,
    ),
    "prepare": Operation(lambda base: None, prepare, check_data, prepare),
    "prepare again": Operation(prepare, prepare, check_data, prepare),
    "train": Operation(train(4), train(8), check_run, train(8)),
}
