"""A corpus that cannot be prepared gives an error with a remedy, and no files are left."""

import re
from pathlib import Path

import pytest

from workhorse.data import DataConfig, prepare
from workhorse.errors import WorkhorseError


@pytest.mark.parametrize(
    ("content", "fraction", "line"),
    [
        ("", 0.1, "corpus.txt is empty: no text for the validation split; add some"),
        ("", 0.0, "corpus.txt is empty: no text for the train split; add some"),
        (
            "x",
            0.1,
            "corpus.txt is too short to hold out a part for validation; add more, or train on all "
            r"text with data\.corpus\.validation_fraction=0$",
        ),
    ],
)
def test_a_corpus_without_text_is_refused(
    tokenizer, tmp_path: Path, content: str, fraction: float, line: str
) -> None:
    (tmp_path / "corpus.txt").write_text(content)
    corpus = {"kind": "text", "path": tmp_path / "corpus.txt", "validation_fraction": fraction}
    with pytest.raises(WorkhorseError, match=line):
        prepare(DataConfig(corpus=corpus), tokenizer, tmp_path / "data")


def test_a_pattern_that_matches_no_file_is_named(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "texts/deep").mkdir(parents=True)
    config = DataConfig(corpus={"kind": "folder", "path": tmp_path / "texts", "glob": "*.zzz"})
    with pytest.raises(WorkhorseError, match="texts has no files; name another folder"):
        prepare(config, tokenizer, tmp_path / "data")
    for name in ("a.txt", "deep/b.txt", ".hidden"):
        (tmp_path / "texts" / name).write_text("text")
    with pytest.raises(
        WorkhorseError, match=r"glob='\*\.zzz' matches no file in .*s \(it has 2\);"
    ):
        prepare(config, tokenizer, tmp_path / "data")


def test_a_folder_of_empty_files_is_not_called_empty(tokenizer, tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    config = DataConfig(corpus={"kind": "folder", "path": tmp_path})
    with pytest.raises(WorkhorseError, match="has no text in its files: no text for the valid"):
        prepare(config, tokenizer, tmp_path / "data")


@pytest.mark.parametrize("name", ["b.txt", "a.txt"])  # by hash, b trains, a is held out
def test_a_single_document_cannot_train_and_be_held_out(
    tokenizer, tmp_path: Path, name: str
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_text("the only text")
    folder = {"kind": "folder", "path": tmp_path / "texts"}
    remedy = "add more, or train on all text with data.corpus.validation_fraction=0"
    with pytest.raises(
        WorkhorseError, match=f"texts has only one document, but .* needs two; {re.escape(remedy)}$"
    ):
        prepare(DataConfig(corpus=folder), tokenizer, tmp_path / "data")
    mixture = {"kind": "mixture", "sources": {"notes": folder}}
    with pytest.raises(WorkhorseError, match=r"with data\.corpus\.sources\.notes\.validation_frac"):
        prepare(DataConfig(corpus=mixture), tokenizer, tmp_path / "data")
    whole = DataConfig(corpus=folder | {"validation_fraction": 0})
    assert prepare(whole, tokenizer, tmp_path / "data").validation is None


def test_an_empty_corpus_leaves_nothing_behind(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("")
    config = DataConfig(corpus={"kind": "text", "path": tmp_path / "corpus.txt"})
    with pytest.raises(WorkhorseError, match="is empty"):
        prepare(config, tokenizer, tmp_path / "data")
    assert not list((tmp_path / "data").iterdir())
