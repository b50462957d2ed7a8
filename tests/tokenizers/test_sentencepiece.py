"""SentencePiece models: the same ids and strings as in the SentencePiece library."""

import io
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from workhorse.checkpoints.gguf.vocabulary import (
    DROPS_SPACE,
    ONE_PREFIX,
    WHOLE,
    read_vocabulary,
    tokenizer_metadata,
)
from workhorse.cli.main import main
from workhorse.errors import WorkhorseError
from workhorse.tokenizers import load_tokenizer
from workhorse.tokenizers.huggingface.sentencepiece import convert

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its SWIG types have no `__module__`
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
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
"""`normalizer_spec { add_dummy_prefix: false }`: appended to a model, it overrides the setting."""
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


@pytest.fixture(scope="module")
def llama(lines: list[str]) -> bytes:
    return train(lines, **MODELS["llama"])


def llama_folder(folder: Path, data: bytes, files: str, **settings: Any) -> Path:
    """Write a LLaMA folder with `tokenizer.model`, `tokenizer.json` or both, as `files` says."""
    folder.mkdir(exist_ok=True)
    if "model" in files:
        (folder / "tokenizer.model").write_bytes(data)
    if "json" in files:
        (folder / "tokenizer.json").write_text(convert(data)[0])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", **named, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


SPACED = (*TEXTS, "  two", "   three", " ", "   ", "\u2581 a", "\u2581x", "\n b")
AFTER_SPECIAL = ("<s>hello", "<s> hello", "<s>   hello", "the</s>the </s> of", "<s><s> a", " <s> a")


def spelled(processor: Any, text: str) -> list[int]:
    """Encode the parts between special tokens: SentencePiece does not match special tokens."""
    ids: list[int] = []
    for part in re.split("(<s>|</s>)", text):
        special = part in ("<s>", "</s>")
        ids += [processor.piece_to_id(part)] if special else processor.encode(part)
    return ids


@pytest.mark.parametrize("files", ["model", "json", "model and json"])
@pytest.mark.parametrize("legacy", [True, False, None])
@pytest.mark.parametrize("prefix", [True, False, None])
def test_the_class_of_llama_keeps_a_leading_space(
    files: str, legacy: bool | None, prefix: bool | None, llama: bytes, tmp_path: Path
) -> None:
    """A leading space is kept, as in SentencePiece and in a GGUF file of the same model."""
    said = {"legacy": legacy, "add_prefix_space": prefix}
    said = {name: value for name, value in said.items() if value is not None}
    ours = load_tokenizer(llama_folder(tmp_path, llama, files, **said))
    keys, remarks = tokenizer_metadata(ours, ours.vocab_size)
    no_prefix = NO_DUMMY_PREFIX if prefix is False else b""
    theirs = sentencepiece.SentencePieceProcessor(model_proto=llama + no_prefix)
    same = read_vocabulary({**keys, WHOLE: None}, ours.vocab_size)
    for text in SPACED:
        ids = theirs.encode(text)
        assert ours.encode(text) == same.encode(text) == ids
        assert ours.decode(ids) == text.replace("\u2581", " ")
    has_one = legacy is not True and prefix is not False
    assert (ONE_PREFIX in remarks) == has_one
    assert DROPS_SPACE not in remarks
    for text in AFTER_SPECIAL:
        ids = ours.encode(text, allow_special=True)
        assert read_vocabulary(keys, ours.vocab_size).encode(text, allow_special=True) == ids
        if has_one:
            assert ours.decode(ids) == text
        else:
            assert spelled(theirs, text) == same.encode(text, allow_special=True) == ids


@pytest.mark.parametrize("files", ["model", "json", "model and json"])
@pytest.mark.parametrize("legacy", [True, False])
def test_a_leading_space_is_dropped_as_in_transformers(
    files: str, legacy: bool, llama: bytes, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = llama_folder(tmp_path / "original", llama, files, legacy=legacy)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    ours, keeping = load_tokenizer(folder, drop_leading_space=True), load_tokenizer(folder)
    for text in (*SPACED, *AFTER_SPECIAL):
        ids = reference.encode(text, add_special_tokens=False)
        assert ours.encode(text, allow_special=True) == ids
    assert ours.encode(" a") == keeping.encode("a") != keeping.encode(" a")
    assert keeping.encode("<s>a", allow_special=True) == ours.encode("<s>a", allow_special=True)
    assert DROPS_SPACE in tokenizer_metadata(ours, ours.vocab_size)[1]
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == ours.fingerprint


def test_the_command_line_can_drop_a_leading_space(
    llama: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(llama_folder(tmp_path, llama, "model"))
    tokenizer = load_tokenizer(folder)
    for text, flags in ((" fox", ()), ("fox", ("--drop-leading-space",))):
        assert main(["tokenizer", "encode", folder, " fox", "--json", *flags]) == 0
        assert json.loads(capsys.readouterr().out)["ids"] == tokenizer.encode(text)


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
        with pytest.raises(WorkhorseError, match="is not a SentencePiece model, or it is damaged"):
            load_tokenizer(file)
    file.write_bytes(train(lines, model_type="char"))
    with pytest.raises(
        WorkhorseError, match=r"has the type word or char, .*; use a BPE or Unigram model"
    ):
        load_tokenizer(file)
