"""Rules that could make a string grow too much are rejected before they are applied."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models
from tokenizers.normalizers import ByteLevel, Normalizer, Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers.pre_tokenizers import Sequence as Splits

from workhorse.errors import WorkhorseError
from workhorse.tokenizers import Tokenizer, load_tokenizer

TEN = "a" * 10
TYPOGRAPHY = {"™": "(TM)", "©": "(C)", "…": "...", "½": "1/2", "№": "No.", "%": " percent"}


def definition(
    normalizer: Normalizer | None = None,
    splitter: PreTokenizer | None = None,
    decoder: decoders.Decoder | None = None,
) -> str:
    library: Any = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    library.normalizer, library.pre_tokenizer = normalizer, splitter
    library.decoder = decoder or decoders.Fuse()
    return library.to_str()


@pytest.mark.parametrize(
    "file",
    [
        definition(Sequence([Replace(Regex("."), TEN)] * 6)),
        definition(Sequence([Replace("a", TEN)] * 6)),
        definition(Sequence([Replace("ab", "abababab"), Replace("b", "b" * 200)])),
        definition(Sequence([Replace("", "a")] * 6)),
        definition(Sequence([Sequence([ByteLevel()] * 5), ByteLevel(), ByteLevel(), ByteLevel()])),
        definition(splitter=Splits([ByteLevelSplit()] * 9)),
        definition(Sequence([Replace("a", TEN * 5)]), Splits([ByteLevelSplit()] * 9)),
        definition(Prepend("a" * 300)),
        definition(Sequence([Prepend("b" * 30), Replace("b", TEN)])),
        definition(decoder=decoders.Sequence([decoders.Replace("a", TEN)] * 3)),
    ],
)
def test_rules_that_multiply_a_text_are_refused(file: str) -> None:
    with pytest.raises(
        WorkhorseError, match="can turn one character into more than 256, the limit"
    ):
        Tokenizer(file)


def test_a_table_of_characters_with_a_long_text_is_refused(tmp_path: Path) -> None:
    """A SentencePiece table (a trie, then strings) as an untrusted author may compile it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    rule = tmp_path / "rule.tsv"
    rule.write_text(f"61\t{' '.join(['62'] * 300)}\n")  # replaces a by 300 times b

    def train(name: str, **settings: str) -> Path:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["some text here"] * 50),
            model_prefix=str(tmp_path / name),
            vocab_size=20,
            hard_vocab_limit=False,
            minloglevel=2,
            **settings,
        )
        return tmp_path / f"{name}.model"

    load_tokenizer(train("usual", normalization_rule_name="nmt_nfkc_cf"))
    with pytest.raises(WorkhorseError, match=r"long\.model: .* one character into more than 256"):
        load_tokenizer(train("long", normalization_rule_tsv=str(rule)))


def test_it_is_refused_before_the_tokens_beside_the_vocabulary_are_normalized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text(definition(Sequence([Replace("a", TEN)] * 6)))
    monkeypatch.setattr("workhorse.tokenizers.huggingface.read.library_tokenizer", None)
    with pytest.raises(
        WorkhorseError, match=r"tokenizer\.json: .* one character into more than 256"
    ):
        load_tokenizer(tmp_path)


def test_many_rules_of_which_each_has_its_own_characters_are_not_refused() -> None:
    """The product of all rules is above 5,000, but no character becomes more than eight."""
    rules = [Replace(old, new) for old, new in TYPOGRAPHY.items()] * 2
    spaces = [Replace(Regex(" {2,}"), " ")] * 9
    splitter = ByteLevelSplit(add_prefix_space=False)
    tokenizer = Tokenizer(definition(Sequence([Prepend(" "), *rules, *spaces]), splitter))
    assert tokenizer.encode("ab") == [0, 1]
    assert json.loads(tokenizer.definition)["normalizer"]["type"] == "Sequence"
