import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from workhorse.data import (
    DataConfig,
    Dataset,
    TokenStream,
    encoding,
    open_dataset,
    preparation,
    prepare,
)
from workhorse.data.documents import hash_of
from workhorse.errors import WorkhorseError
from workhorse.tokenizers import train_tokenizer
from workhorse.tokenizers.config import BpeConfig, ByteFallbackBpeConfig

EOS = 257
TEXTS = [f"document {i}: " + "é" * (i % 7) for i in range(40)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make shards of 100 tokens, encode three documents at a time, and skip fsync."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)
    monkeypatch.setattr(preparation, "SHARD_TOKENS", 100)
    monkeypatch.setattr(encoding, "BLOCK_PIECES", 3)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return DataConfig(corpus={"kind": "jsonl", "path": path, "validation_fraction": 0.2})


def all_tokens(stream: TokenStream) -> list[int]:
    return stream.read(0, len(stream)).tolist()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tokens_are_those_of_the_documents_each_with_its_eos(
    config: DataConfig, tokenizer, tmp_path: Path
) -> None:
    dataset = prepare(config, tokenizer, tmp_path / "data")
    documents = []
    for split in (dataset.train, dataset.validation):
        (stream,) = split.streams
        starts = [0, *stream.ends[:-1]]
        documents += [
            stream.read(start, stop).tolist()
            for start, stop in zip(starts, stream.ends, strict=True)
        ]
        assert split.n_documents == len(stream.ends)
        assert split.n_tokens == len(stream) == split.n_bytes + split.n_documents
    assert sorted(documents) == sorted([*text.encode(), EOS] for text in TEXTS)
    assert len(list(dataset.folder.glob("train-*.tokens.npy"))) > 3


def test_documents_may_begin_with_bos_and_end_with_nothing(
    config: DataConfig, tokenizer, tmp_path: Path
) -> None:
    dataset = prepare(config.replace(bos=True, eos=False), tokenizer, tmp_path / "data")
    tokens = all_tokens(dataset.train.streams[0])
    assert tokens[0] == 256
    assert tokens.count(256) == dataset.train.n_documents
    assert EOS not in tokens


@pytest.mark.parametrize(("lengths", "told"), [((400, 3), True), ((3, 400), False)])
def test_it_is_told_if_more_is_held_out_than_trains(
    tokenizer, tmp_path: Path, lengths: tuple[int, int], told: bool
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    held_and_trains = sorted(("a.txt", "b.txt"), key=hash_of)
    for name, length in zip(held_and_trains, lengths, strict=True):
        (texts / name).write_text("x" * length)
    lines: list[str] = []
    config = DataConfig(corpus={"kind": "folder", "path": texts})
    prepare(config, tokenizer, tmp_path / "data", notify=lines.append)
    assert bool(lines) == told
    assert not told or lines[0].startswith(
        "the validation split has 401 tokens and the training split 4, because only whole documents"
    )


def test_unknown_characters_are_counted_kept_and_told(
    config: DataConfig, tokenizer, tmp_path: Path
) -> None:
    told: list[str] = []
    known = prepare(config, tokenizer, tmp_path / "known", notify=told.append)
    assert (known.train.unknown_rate, told) == (0, [])
    lines = [json.dumps({"text": text.replace("é", "?")}) + "\n" for text in TEXTS]
    config.sources["corpus"].path.write_text("".join(lines))
    for _ in range(2):  # prepared, then opened again
        dataset = prepare(config, tokenizer, tmp_path / "data", notify=told.append)
        splits = (dataset.train, dataset.validation)
        tokens = sum(split.n_tokens for split in splits)
        unknown = sum(stream.n_unknown for split in splits for stream in split.streams)
        assert unknown == sum(text.count("é") for text in TEXTS)
        assert dataset.train.unknown_rate == all_tokens(dataset.train.streams[0]).count(
            ord("?")
        ) / len(dataset.train.streams[0])
        assert told.pop().startswith(f"{unknown} of {tokens:,} tokens (")


def test_a_piece_of_a_document_begins_without_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workhorse.data.documents.PIECE_CHARS", 30)
    tokenizer = train_tokenizer(ByteFallbackBpeConfig(vocab_size=270), ["a word\n"])
    (tmp_path / "a.txt").write_text("a word\n" * 20)
    corpus = {"kind": "text", "path": tmp_path / "a.txt", "validation_fraction": 0}
    dataset = prepare(DataConfig(corpus=corpus, eos=False), tokenizer, tmp_path / "data")
    assert all_tokens(dataset.train.streams[0]) == tokenizer.encode("a word\n" * 20)


def test_a_document_in_pieces_begins_and_ends_once(
    tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workhorse.data.documents.PIECE_CHARS", 30)
    text = "0123456789" * 50
    (tmp_path / "a.txt").write_text(text)
    corpus = {"kind": "text", "path": tmp_path / "a.txt", "validation_fraction": 0}
    dataset = prepare(DataConfig(corpus=corpus, bos=True), tokenizer, tmp_path / "data")
    assert all_tokens(dataset.train.streams[0]) == [256, *text.encode(), EOS]
    assert dataset.train.streams[0].ends.tolist() == [502]
    assert len(list(dataset.folder.glob("train-*.tokens.npy"))) > 3
    assert dataset.validation is None


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_tokens_take_as_few_bytes_as_the_vocabulary_allows(
    config: DataConfig, tokenizer, tmp_path: Path, vocab_size: int, dtype: str
) -> None:
    tokenizer.vocab_size, tokenizer.eos_id = vocab_size, vocab_size - 1
    dataset = prepare(config, tokenizer, tmp_path / "data")
    assert np.load(dataset.folder / "train-corpus-00000.tokens.npy").dtype == dtype
    assert vocab_size - 1 in all_tokens(dataset.train.streams[0])


def test_what_is_prepared_is_used_again(config: DataConfig, tokenizer, tmp_path: Path) -> None:
    first = prepare(config, tokenizer, tmp_path / "data")
    encoded = tokenizer.encoded_texts
    again = prepare(config, tokenizer, tmp_path / "data", verify=True)
    assert tokenizer.encoded_texts == encoded
    assert again.folder == first.folder
    assert again.fingerprint == first.fingerprint
    assert again.manifest == first.manifest


def test_packing_and_weights_do_not_need_new_tokens(
    config: DataConfig, tokenizer, tmp_path: Path
) -> None:
    sources = {"a": config.corpus, "b": config.corpus}
    mixed = DataConfig(corpus={"kind": "mixture", "sources": sources})
    first = prepare(mixed, tokenizer, tmp_path / "data")
    encoded = tokenizer.encoded_texts
    corpus = mixed.corpus.replace(weights={"b": 4})
    again = prepare(mixed.replace(corpus=corpus, packing="documents"), tokenizer, tmp_path / "data")
    assert tokenizer.encoded_texts == encoded
    assert (first.train.weights, again.train.weights) == ((1.0, 1.0), (1.0, 4.0))


@pytest.mark.parametrize("change", ["content", "time", "tokenizer", "eos", "fraction"])
def test_a_change_prepares_anew(config: DataConfig, tokenizer, tmp_path: Path, change: str) -> None:
    first = prepare(config, tokenizer, tmp_path / "data")
    path = config.corpus.path
    match change:
        case "content":
            path.write_text('{"text": "new"}\n' * 3 + path.read_text())
        case "time":
            os.utime(path, (1, 1))
        case "tokenizer":
            tokenizer.fingerprint = "another"
        case "eos":
            config = config.replace(eos=False)
        case "fraction":
            config = config.replace(corpus=config.corpus.replace(validation_fraction=0.3))
    second = prepare(config, tokenizer, tmp_path / "data")
    assert second.folder != first.folder
    same_tokens = change in ("time", "tokenizer")
    assert (second.fingerprint == first.fingerprint) == same_tokens


def test_runs_share_a_cache(config: DataConfig, tokenizer, tmp_path: Path) -> None:
    shared = config.replace(cache_dir=tmp_path / "cache")
    one = prepare(shared, tokenizer, tmp_path / "run1")
    other = prepare(shared, tokenizer, tmp_path / "run2")
    assert one.folder == other.folder
    assert one.folder.parent == tmp_path / "cache"
    assert not (tmp_path / "run1").exists()


def test_builders_of_the_same_data_wait_for_each_other(
    config: DataConfig, tokenizer, tmp_path: Path
) -> None:
    datasets: list[Dataset] = []

    def build() -> None:
        datasets.append(prepare(config, tokenizer, tmp_path / "data"))

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({dataset.folder for dataset in datasets}) == 1
    assert len(datasets) == 4
    assert tokenizer.encoded_texts == len(TEXTS)


@pytest.mark.parametrize("survived", range(1, 12))
def test_a_killed_build_goes_on_and_gives_the_same_bytes(
    config: DataConfig, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    whole = prepare(config, tokenizer, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", dies_after(survived * 2))
        with pytest.raises(KeyboardInterrupt):
            prepare(config, tokenizer, tmp_path / "killed")
    tokenizer.encoded_texts = 0
    resumed = prepare(config, tokenizer, tmp_path / "killed")
    assert files_of(resumed.folder) == files_of(whole.folder)
    if survived > 6:
        assert tokenizer.encoded_texts < len(TEXTS)


def dies_after(calls: int) -> Callable[[int], None]:
    left = iter(range(calls))

    def fsync(_descriptor: int) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return fsync


def test_an_unfinished_data_set_is_not_opened(
    config: DataConfig, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", dies_after(20))
    with pytest.raises(KeyboardInterrupt):
        prepare(config, tokenizer, tmp_path / "data")
    (folder,) = (tmp_path / "data").iterdir()
    with pytest.raises(
        WorkhorseError, match="is incomplete: its preparation was interrupted; run workhorse data"
    ):
        open_dataset(folder)


@pytest.mark.parametrize("damage", ["missing", "cut", "longer", "other dtype", "manifest", "pipe"])
def test_damage_in_size_is_found_at_once_and_mended_by_preparing(
    config: DataConfig, tokenizer, tmp_path: Path, damage: str
) -> None:
    dataset = prepare(config, tokenizer, tmp_path / "data")
    before = files_of(dataset.folder)
    shard = dataset.folder / "train-corpus-00001.tokens.npy"
    match damage:
        case "missing":
            shard.unlink()
        case "cut":
            shard.write_bytes(before[shard.name][:-1])
        case "longer":
            shard.write_bytes(before[shard.name] + b"x")
        case "other dtype":
            np.save(shard, np.load(shard).astype(np.int64)[:-1])
        case "manifest":
            (dataset.folder / "manifest.json").write_text("{")
        case "pipe":
            shard.unlink()
            os.mkfifo(shard)
    with pytest.raises(WorkhorseError, match=r"is damaged.*prepare"):
        open_dataset(dataset.folder)
    prepare(config, tokenizer, tmp_path / "data")
    assert files_of(dataset.folder) == before


@pytest.mark.parametrize(
    "name", ["train-corpus-00002.tokens.npy", "validation-corpus-00000.ends.npy"]
)
def test_a_flipped_bit_is_found_and_mended(
    config: DataConfig, tokenizer, tmp_path: Path, name: str
) -> None:
    dataset = prepare(config, tokenizer, tmp_path / "data")
    before = files_of(dataset.folder)
    content = bytearray(before[name])
    content[-3] ^= 1
    (dataset.folder / name).write_bytes(content)
    with pytest.raises(WorkhorseError, match=f"{name} is damaged: its checksum differs"):
        open_dataset(dataset.folder)
    prepare(config, tokenizer, tmp_path / "data").verify()
    assert files_of(dataset.folder) == before


def test_bytes_do_not_depend_on_the_number_of_threads(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer(BpeConfig(vocab_size=300), TEXTS)
    folders = []
    for parallel in ("true", "false"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        folders.append(prepare(config, tokenizer, tmp_path / parallel).folder)
    assert files_of(folders[0]) == files_of(folders[1])


@pytest.mark.parametrize("pieces", [1, 7, 4096])
def test_bytes_do_not_depend_on_how_the_work_is_cut(
    config: DataConfig, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    reference = prepare(config, tokenizer, tmp_path / "a")
    monkeypatch.setattr(encoding, "BLOCK_PIECES", pieces)
    other = prepare(config, tokenizer, tmp_path / "b")
    assert files_of(other.folder) == files_of(reference.folder)


def test_progress_ends_at_the_bytes_of_the_text(
    config: DataConfig, tokenizer, tmp_path: Path
) -> None:
    reports: list[tuple[int, int | None]] = []
    prepare(config, tokenizer, tmp_path / "data", progress=lambda *report: reports.append(report))
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    assert reports[-1] == (n_bytes, n_bytes)


def test_the_manifest_says_what_was_read(config: DataConfig, tokenizer, tmp_path: Path) -> None:
    dataset = prepare(config, tokenizer, tmp_path / "data")
    manifest = json.loads((dataset.folder / "manifest.json").read_text())
    assert manifest["tokenizer"] == tokenizer.fingerprint
    source = manifest["sources"]["corpus"]
    assert (source["kind"], source["files"]) == ("jsonl", 1)
    assert source["bytes"] == config.corpus.path.stat().st_size
    assert str(tmp_path / "corpus.jsonl") == source["path"]


@pytest.mark.parametrize("token", ["bos", "eos"])
def test_a_token_that_the_tokenizer_lacks_is_refused(
    config: DataConfig, tokenizer, tmp_path: Path, token: str
) -> None:
    setattr(tokenizer, f"{token}_id", None)
    with pytest.raises(WorkhorseError, match=f"the tokenizer has no {token} token; set data."):
        prepare(config.replace(**{token: True}), tokenizer, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_corpus_that_changes_while_it_is_read_is_refused(
    config: DataConfig, tokenizer, tmp_path: Path
) -> None:
    def meddle(texts: Sequence[str], *, begins: bool) -> list[list[int]]:
        os.utime(config.corpus.path, (1, 1))
        return [list(text.encode()) for text in texts]

    tokenizer.encode_batch = meddle
    with pytest.raises(WorkhorseError, match="a source changed while it was read"):
        prepare(config, tokenizer, tmp_path / "data")


def test_a_failure_of_the_tokenizer_is_passed_on(
    config: DataConfig, tokenizer, tmp_path: Path
) -> None:
    def fail(texts: Sequence[str], *, begins: bool) -> Iterator[list[int]]:
        raise WorkhorseError("'é' is not in the vocabulary")

    tokenizer.encode_batch = fail
    with pytest.raises(WorkhorseError, match="'é' is not in the vocabulary"):
        prepare(config, tokenizer, tmp_path / "data")


def test_no_data_is_not_a_data_set(tmp_path: Path) -> None:
    with pytest.raises(WorkhorseError, match="has no prepared data; run workhorse data prepare"):
        open_dataset(tmp_path)
