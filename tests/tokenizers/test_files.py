"""Saving and loading tokenizers, and errors for invalid files."""

import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models

from workhorse.errors import WorkhorseError
from workhorse.files.writing import TEMPORARY
from workhorse.tokenizers import (
    FileConfig,
    Tokenizer,
    check_output_folder,
    load_tokenizer,
    train_tokenizer,
)

Trained = Callable[[str], Tokenizer]
TEXT = "The fox, naïve: <s> 東京 12345\n\treturn"


def test_what_was_saved_loads_as_it_was(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "a" / "b")
    for path in (tmp_path / "a" / "b", tmp_path / "a" / "b" / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
        assert (loaded.bos_id, loaded.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    loaded.save(tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "a/b" / name).read_bytes()


def test_the_chat_template_is_kept(trained: Trained, tmp_path: Path) -> None:
    bpe = trained("bpe")
    Tokenizer(bpe.definition, bpe.roles, "{{ messages[0].content }}").save(tmp_path)
    assert load_tokenizer(tmp_path).chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize("call", ["replace", "rename", "unlink", "fsync", "scandir", "listdir"])
def test_of_one_tokenizer_over_another_one_is_there_whole_whatever_fails(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """If any file-system call fails, the folder has either the old or the new tokenizer."""
    bpe = trained("bpe")
    first, second = (Tokenizer(bpe.definition, roles, {}) for roles in (bpe.roles, {}))
    real, left = getattr(os, call), 0

    def refuse(*given: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(*given, **named)

    for at in range(1, 100):
        folder = tmp_path / str(at)
        first.save(folder)
        (folder / "chat_template.jinja").write_text("of the first")
        with monkeypatch.context() as failing, contextlib.suppress(WorkhorseError):
            failing.setattr(os, call, refuse)
            left = at
            second.save(folder)
        found = load_tokenizer(folder)
        assert (found.roles, found.chat_template) in ((first.roles, "of the first"), ({}, None))
        second.save(folder)
        assert load_tokenizer(folder).roles == {}
        assert sorted(path.name for path in folder.iterdir() if TEMPORARY not in path.name) == [
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        if left > 0:
            break
    assert at > 1


def test_a_file_config_loads(trained: Trained, tmp_path: Path) -> None:
    trained("bpe").save(tmp_path)
    loaded = train_tokenizer(FileConfig(path=str(tmp_path)), [])
    assert loaded.fingerprint == trained("bpe").fingerprint


def test_transformers_reads_it_alike(trained: Trained, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trained("bpe").save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    plain = TEXT.replace("<s>", "")
    assert theirs.encode(plain, add_special_tokens=False) == trained("bpe").encode(plain)
    assert theirs.eos_token_id == trained("bpe").eos_id


def test_a_bos_written_as_a_mapping_is_read(trained: Trained, tmp_path: Path) -> None:
    """Older versions of transformers write bos_token as a mapping."""
    trained("bpe").save(tmp_path)
    settings = {"bos_token": {"content": "<|bos|>", "lstrip": False}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_id, loaded.eos_id) == (0, None)


def test_a_control_token_that_merges_can_reach_is_guarded() -> None:
    """Merges of a `tokenizer.json` trained on HTML may produce a control token."""
    vocab = {token: number for number, token in enumerate(["<s>", "<", "s", ">", "<s", "a"])}
    model = models.BPE(vocab=vocab, merges=[("<", "s"), ("<s", ">")])
    library = LibraryTokenizer(model)
    library.decoder = decoders.Fuse()
    library.add_special_tokens(["<s>"])
    library.encode_special_tokens = True
    assert library.encode("a<s>a").ids == [5, 0, 5]  # the library itself would produce the token
    tokenizer = Tokenizer(library.to_str())
    assert tokenizer.encode("a<s>a") == [5, 1, 2, 3, 5]
    assert tokenizer.encode("a<s>a", allow_special=True) == [5, 0, 5]
    assert tokenizer.encode("<sa") == [4, 5]


def test_a_whole_word_of_the_vocabulary_is_guarded_too() -> None:
    """With `ignore_merges` (Llama 3), a word in the vocabulary needs no merges."""
    model = models.BPE(vocab={"<s>": 0, "<": 1, "s": 2, ">": 3}, merges=[], ignore_merges=True)
    library = LibraryTokenizer(model)
    library.decoder = decoders.Fuse()
    library.add_special_tokens(["<s>"])
    assert Tokenizer(library.to_str()).encode("<s>") == [1, 2, 3]


def test_a_crash_while_saving_leaves_what_was_there(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained("bpe").save(tmp_path / "old")
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    for name in ("old", "new"):
        with pytest.raises(WorkhorseError, match=rf"cannot write .*/{name}: No space left"):
            trained("bytes").save(tmp_path / name)
    assert not (tmp_path / "new").exists()
    after = {path.name: path.read_bytes() for path in (tmp_path / "old").glob("[!.]*")}
    assert after == before


def test_another_tokenizer_takes_the_place(trained: Trained, tmp_path: Path) -> None:
    trained("bpe").save(tmp_path)
    check_output_folder(tmp_path)
    trained("bytes").save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == trained("bytes").fingerprint


def test_drop_leading_space_is_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(WorkhorseError, match="drop_leading_space='no' is not True or False"):
        load_tokenizer(tmp_path, drop_leading_space="no")  # pyright: ignore[reportArgumentType]


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    check_output_folder(tmp_path)
    check_output_folder(tmp_path / "new")
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(WorkhorseError, match="has other files and no tokenizer; choose a new"):
        check_output_folder(tmp_path)
    with pytest.raises(WorkhorseError, match=r"thesis\.txt is a file"):
        check_output_folder(tmp_path / "thesis.txt")


def test_what_cannot_be_loaded_says_so_in_one_line(trained: Trained, tmp_path: Path) -> None:
    trained("bpe").save(tmp_path / "good")
    definition = trained("bpe").definition

    def refused(name: str, content: bytes, message: str, settings: str = "{}") -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes(content)
        (folder / "tokenizer_config.json").write_text(settings)
        with pytest.raises(WorkhorseError, match=message) as raised:
            load_tokenizer(folder)
        assert "\n" not in str(raised.value)

    refused(
        "cut", definition.encode()[:500], "tokenizer.json is not valid JSON: Unterminated string"
    )
    refused("empty", b"", "tokenizer.json is not valid JSON")
    refused("other", b'{"model": {}}', "not a tokenizer.json")
    refused("latin", b"{\xe9}", "is not UTF-8: bad byte at offset 1")
    refused("settings", definition.encode(), "is not valid JSON", "{")
    ctc = json.dumps({**json.loads(definition), "decoder": json.loads(CTC)})
    refused("ctc", ctc.encode(), "the decoder 'CTC' cannot decode token by token")
    with pytest.raises(WorkhorseError, match="nowhere: no such file or folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(
        WorkhorseError, match=r"it has no tokenizer\.json, no tokenizer\.model, and no"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
    ],
)
def test_a_pointer_of_git_lfs_is_named(name: str, trained: Trained, tmp_path: Path) -> None:
    if name in ("vocab.json", "merges.txt"):
        (tmp_path / "vocab.json").write_text("{}")
        (tmp_path / "merges.txt").write_text("")
    elif name != "tokenizer.model":
        trained("bpe").save(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
    (tmp_path / name).write_text(pointer)
    places = [tmp_path / name] if name in ("tokenizer.json", "tokenizer.model") else []
    for place in (tmp_path, *places):
        with pytest.raises(WorkhorseError, match=f"{name} is a Git LFS pointer, not the file"):
            load_tokenizer(place)


@pytest.mark.parametrize("name", ["a" * 100_000, "a/" * 50_000])
def test_a_name_that_is_too_long_is_one_short_line(name: str) -> None:
    with pytest.raises(WorkhorseError, match=r"no tokenizer at .*…: File name too long") as raised:
        load_tokenizer(name)
    assert len(str(raised.value)) < 200


CTC = '{"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true}'
