from pathlib import Path

import pytest

from workhorse.data import DataConfig, prepare, prepare_tokenizer
from workhorse.tokenizers import Tokenizer, train_tokenizer
from workhorse.tokenizers.config import BpeConfig, CharactersConfig, FileConfig


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "a.txt").write_text("hello there, hello again\n" * 20 + "ZZZZ" * 14)
    return DataConfig(corpus={"kind": "text", "path": tmp_path / "a.txt"}, eos=False)


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one element with every training."""
    times: list[int] = []

    def train(*arguments: object) -> Tokenizer:
        times.append(1)
        return train_tokenizer(*arguments)

    monkeypatch.setattr("workhorse.tokenizers.train_tokenizer", train)
    return times


def test_a_tokenizer_is_trained_once(
    config: DataConfig, tmp_path: Path, trainings: list[int]
) -> None:
    first = prepare_tokenizer(BpeConfig(vocab_size=280), config, tmp_path / "data")
    again = prepare_tokenizer(BpeConfig(vocab_size=280), config, tmp_path / "data")
    assert trainings == [1]
    assert again.fingerprint == first.fingerprint


def test_a_vocabulary_that_stays_smaller_is_told_every_time(
    config: DataConfig, tmp_path: Path
) -> None:
    said: list[str] = []
    for size in (4096, 4096, 270):
        made = prepare_tokenizer(
            BpeConfig(vocab_size=size), config, tmp_path / "data", notify=said.append
        )
        if size == 4096:
            missing = 4096 - made.vocab_size
            assert said[-1].startswith(f"the tokenizer has {made.vocab_size} tokens, {missing:,} ")
    assert len(said) == 2


@pytest.mark.parametrize("change", ["corpus", "config"])
def test_a_change_trains_anew(
    config: DataConfig, tmp_path: Path, trainings: list[int], change: str
) -> None:
    wanted = BpeConfig(vocab_size=280)
    first = prepare_tokenizer(wanted, config, tmp_path / "data")
    if change == "corpus":
        config.corpus.path.write_text("something else" * 20)
    else:
        wanted = BpeConfig(vocab_size=270)
    second = prepare_tokenizer(wanted, config, tmp_path / "data")
    assert trainings == [1, 1]
    assert second.fingerprint != first.fingerprint


def test_a_tokenizer_never_sees_what_is_held_out(config: DataConfig, tmp_path: Path) -> None:
    tokenizer = prepare_tokenizer(CharactersConfig(), config, tmp_path / "data")
    assert "o" in tokenizer.decode(range(tokenizer.vocab_size))
    assert "Z" not in tokenizer.decode(range(tokenizer.vocab_size))


def test_a_tokenizer_of_a_file_is_only_loaded(config: DataConfig, tmp_path: Path) -> None:
    trained = train_tokenizer(BpeConfig(vocab_size=280), ["hello there"])
    trained.save(tmp_path / "tokenizer")
    loaded = prepare_tokenizer(
        FileConfig(path=str(tmp_path / "tokenizer")), config, tmp_path / "data"
    )
    assert loaded.fingerprint == trained.fingerprint
    assert not (tmp_path / "data").exists()


def test_progress_counts_the_training_text(config: DataConfig, tmp_path: Path) -> None:
    reports: list[tuple[int, int | None]] = []
    prepare_tokenizer(
        BpeConfig(vocab_size=280),
        config,
        tmp_path / "data",
        progress=lambda *report: reports.append(report),
    )
    assert reports[-1] == (500, 556)


def test_a_character_run_has_exactly_the_characters(config: DataConfig, tmp_path: Path) -> None:
    """The data equals nanoGPT's character data: one token per character, split at 90%."""
    config.corpus.path.write_text(text := "0123456789" * 30 + "987")
    tokenizer = prepare_tokenizer(CharactersConfig(), config, tmp_path / "data")
    dataset = prepare(config, tokenizer, tmp_path / "data")
    splits = [dataset.train, dataset.validation]
    streams = [split.streams[0] for split in splits]
    decoded = [tokenizer.decode(stream.read(0, len(stream)).tolist()) for stream in streams]
    assert decoded == [text[: int(0.9 * 303)], text[int(0.9 * 303) :]]
