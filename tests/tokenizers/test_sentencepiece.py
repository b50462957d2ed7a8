"""SentencePiece models: the ids and the texts of the SentencePiece library itself."""

import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from workhorse.checkpoints.gguf.read_vocabulary import read_vocabulary
from workhorse.checkpoints.gguf.vocabulary import WHOLE, tokenizer_metadata
from workhorse.errors import WorkhorseError
from workhorse.tokenizers import load_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its SWIG types have no module
    sentencepiece = pytest.importorskip("sentencepiece")

IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        **IDENTITY,
    },
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<sep>"],
        **IDENTITY,
    },
    "bpe": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram"},
    "unigram with bytes": {"model_type": "unigram", "byte_fallback": True, "pad_id": 3},
    "unigram across words": {"model_type": "unigram", "split_by_whitespace": False},
}
TEXTS = [
    "The quick brown fox",
    " leading",
    "trailing  ",
    "a  b   c",
    "",
    "hello <s> x </s> <unk> <0x41> [UNK]",
    "é 東京 ﬁ ① ½ 🦊",
    "tab\tline\n",
    "12345 67",
    "over<sep>the<sep>",
]


def train(lines: list[str], **options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def lines(corpus: list[str]) -> list[str]:
    return [line for text in corpus for line in text.splitlines()]


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_texts_are_the_library_s(name: str, lines: list[str], tmp_path: Path) -> None:
    data = train(lines, **MODELS[name])
    (tmp_path / "tokenizer.model").write_bytes(data)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    ours = load_tokenizer(tmp_path)
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.unk_id, ours.bos_id, ours.eos_id) == (0, 1, 2)
    assert ours.pad_id == MODELS[name].get("pad_id")
    for text in [*TEXTS, *sorted(set(lines))]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids).replace(" \u2047 ", "<unk>")
    controls = [theirs.bos_id(), *theirs.encode("fox jumps"), theirs.eos_id()]
    assert ours.decode(controls, skip_special=True) == theirs.decode(controls)


@pytest.mark.parametrize("legacy", [True, False])
def test_the_class_of_llama_keeps_a_leading_space(
    legacy: bool, lines: list[str], tmp_path: Path
) -> None:
    """As SentencePiece and a GGUF file of the same model; transformers drops it."""
    transformers = pytest.importorskip("transformers")
    data = train(lines, **MODELS["llama"])
    (tmp_path / "tokenizer.model").write_bytes(data)
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    ours = load_tokenizer(tmp_path)
    keys, _ = tokenizer_metadata(ours, ours.vocab_size)
    same = read_vocabulary({**keys, WHOLE: None}, ours.vocab_size)
    for text in (*TEXTS, "  two", "   ", "\u2581 a", "\n b", *lines[:50]):
        ids = theirs.encode(text)
        assert ours.encode(text) == same.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids).replace(" \u2047 ", "<unk>")
    dropping = load_tokenizer(tmp_path, drop_leading_space=True)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    dropped = reference.encode(" a", add_special_tokens=False)
    assert dropping.encode(" a") == ours.encode("a") == dropped
    dropping.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == dropping.fingerprint


def test_a_converted_model_saves_as_tokenizer_json(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.model").write_bytes(train(lines, **MODELS["llama"]))
    ours = load_tokenizer(tmp_path / "x.model")
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == ours.fingerprint


def test_other_models_and_damaged_files_are_refused(lines: list[str], tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    good = train(lines, **MODELS["bpe"])
    for damaged in (b"", b"hello world", good[: len(good) // 2], b"\x00" * 100):
        file.write_bytes(damaged)
        with pytest.raises(WorkhorseError, match="is no SentencePiece model, or damaged"):
            load_tokenizer(file)
    file.write_bytes(train(lines, model_type="char"))
    with pytest.raises(WorkhorseError, match="only BPE and Unigram models can be read"):
        load_tokenizer(file)
