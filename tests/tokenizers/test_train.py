"""Training of tokenizers: sizes, order of ids, and the same result every time."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import eq
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from workhorse.config.base import ConfigError
from workhorse.errors import WorkhorseError
from workhorse.tokenizers import (
    BpeConfig,
    BytesConfig,
    CharactersConfig,
    SpecialTokensConfig,
    Tokenizer,
    UnigramConfig,
    WordPieceConfig,
    WordsConfig,
    tokenizer_config,
    train_tokenizer,
)
from workhorse.tokenizers.pieces import BYTE_ALPHABET
from workhorse.tokenizers.training import (
    MAX_CHARACTERS,
    MAX_RUN,
    counted,
    split_documents,
    stable_vocabulary,
)

Trained = Callable[[str], Tokenizer]

TRAIN_ALL = """
import json, sys
from workhorse.tokenizers import tokenizer_config, train_tokenizer
configs, corpus = json.load(sys.stdin)
for name, config in configs.items():
    print(name, train_tokenizer(tokenizer_config(config), corpus).fingerprint)
"""


def test_the_same_corpus_gives_the_same_tokenizer_in_any_process(
    corpus: list[str], configs: dict[str, dict[str, Any]], trained: Trained
) -> None:
    names = ["bpe", "byte_fallback_bpe", "wordpiece", "unigram", "characters", "words"]
    configs = {name: configs[name] for name in names}
    request = json.dumps([configs, corpus])
    here = [f"{name} {trained(name).fingerprint}" for name in names]
    for seed, threads in (("1", "1"), ("2", "4")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        process = subprocess.run(
            [sys.executable, "-c", TRAIN_ALL],
            input=request,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert process.stdout.splitlines() == here


def test_rare_unigram_characters_are_put_in_order() -> None:
    """Their scores are in equal steps, in random order, with noise in the last digits."""
    pieces = [("ab", -1.0), ("a", -2.0), ("b", -3.5)]
    one = stable_vocabulary([*pieces, ("é", -9.0), ("東", -8.9999), ("ß", -8.9998)])
    other = stable_vocabulary([("東", -9.0), ("ß", -8.9999), ("é", -8.9998 + 1e-11), *pieces])
    assert one == other
    assert [piece for piece, _ in one] == ["ab", "a", "b", "東", "é", "ß"]


@pytest.mark.parametrize("kind", ["bpe", "byte_fallback_bpe", "wordpiece"])
def test_the_vocabulary_has_the_size_asked_for(kind: str) -> None:
    syllables = ["ka", "lo", "mi", "nu", "per", "sta", "tri"]
    words = [a + b + c for a in syllables for b in syllables for c in syllables]
    config = tokenizer_config({"kind": kind, "vocab_size": 340})
    assert train_tokenizer(config, [" ".join(words)] * 2).vocab_size == 340


@pytest.mark.parametrize("kind", ["bpe", "byte_fallback_bpe", "wordpiece", "unigram", "words"])
def test_a_control_token_named_like_a_word_is_not_learned_from_the_corpus(kind: str) -> None:
    fields = {"kind": kind, "vocab_size": 300, "special": {"eos": "Stop"}}
    tokenizer = train_tokenizer(tokenizer_config(fields), ["Stop the dog. Stop it, Stop! " * 50])
    assert tokenizer.eos_id not in tokenizer.encode("Stop the dog, Stop")
    model = json.loads(tokenizer.definition)["model"]
    assert all(left + right != "Stop" for left, right in model.get("merges", []))
    assert tokenizer.encode("Stop", allow_special=True) == [tokenizer.eos_id]


Pair = tuple[bytes, bytes]


def learned(text: str, merges: int, prefer: Callable[[Pair, dict[bytes, int]], Any]) -> list[Pair]:
    """BPE as in 1508.07909, with GPT-2's pattern for ASCII; `prefer` decides between ties."""
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
    found_words = (word.encode() for word in re.findall(pattern, text))
    words = Counter(tuple(bytes([byte]) for byte in word) for word in found_words)
    in_order = sorted(range(256), key=BYTE_ALPHABET.__getitem__)
    ids = {bytes([byte]): number for number, byte in enumerate(in_order)}
    found: list[Pair] = []
    while len(found) < merges:
        counts: Counter[Pair] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                counts[pair] += count
        best = max(counts, key=lambda pair: (counts[pair], prefer(pair, ids)))
        found.append(best)
        ids[b"".join(best)] = len(ids)
        words = Counter({merged(word, best): count for word, count in words.items()})
    return found


def merged(word: tuple[bytes, ...], pair: Pair) -> tuple[bytes, ...]:
    parts: list[bytes] = []
    for part in word:
        if parts and (parts[-1], part) == pair:
            parts[-1] += part
        else:
            parts.append(part)
    return tuple(parts)


def test_bpe_of_gpt2s_words_differs_from_the_reference_only_in_ties() -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text("ascii")
    tokenizer = train_tokenizer(BpeConfig(vocab_size=256 + 7 + 243, split="gpt2"), [text])
    ours = [
        tuple(bytes(map(BYTE_ALPHABET.index, part)) for part in pair)
        for pair in json.loads(tokenizer.definition)["model"]["merges"]
    ]
    assert ours == learned(text, 243, lambda pair, ids: [-ids[part] for part in pair])
    greatest = learned(text, 243, lambda pair, _: pair)  # Sennrich's choice
    assert len({*ours} & {*greatest}) == 212
    assert sum(map(eq, ours, greatest)) == 54
    with pytest.raises(ConfigError, match="digits=1 has no effect on split=gpt2"):
        BpeConfig(vocab_size=300, split="gpt2", digits=1)


def test_a_small_corpus_gives_a_smaller_vocabulary() -> None:
    tokenizer = train_tokenizer(BpeConfig(vocab_size=5000), ["tiny tiny"])
    assert 256 + 7 < tokenizer.vocab_size < 280


def test_special_tokens_come_first(trained: Trained) -> None:
    assert list(trained("bpe").special_tokens.values()) == list(range(7))
    unigram = trained("unigram")
    assert (unigram.unk_id, unigram.bos_id, unigram.eos_id, unigram.pad_id) == (0, 1, 2, 3)


def test_characters_are_in_code_point_order() -> None:
    tokenizer = train_tokenizer(CharactersConfig(), ["dcba", "a"])
    assert tokenizer.encode("abcd") == [2, 3, 4, 5]
    assert tokenizer.vocab_size == 6


def test_the_rarest_characters_give_way() -> None:
    tokenizer = train_tokenizer(CharactersConfig(vocab_size=4), ["aaabbc"])
    assert tokenizer.decode(tokenizer.encode("abc")) == "ab<|unk|>"


def test_unknown_characters_of_a_string(trained: Trained) -> None:
    assert trained("characters").unknown("a ☃é中☃") == ["☃", "中"]
    assert trained("bpe").unknown("☃") == []


def test_words_and_punctuation_marks_are_tokens_in_the_order_of_frequency() -> None:
    text = "The cat sat. The dog didn't!"
    tokenizer = train_tokenizer(WordsConfig(), [text])
    names = ["<|unk|>", "<|eos|>", "The", "!", ".", "cat", "didn't", "dog", "sat"]
    assert tokenizer.vocabulary == {name: number for number, name in enumerate(names)}
    assert tokenizer.encode("The bird\n sat!") == [2, 0, 8, 3]
    assert tokenizer.unknown("A bird sat. The bird, naïvely") == ["A", "bird", ",", "naïvely"]
    assert tokenizer.unknown("The <|eos|>") == ["<", "|", "eos", ">"]
    assert tokenizer.unknown("") == []
    assert tokenizer.decode(tokenizer.encode(text)) == text
    small = train_tokenizer(WordsConfig(vocab_size=4), ["b the a the b"])
    assert small.vocabulary == {"<|unk|>": 0, "<|eos|>": 1, "b": 2, "the": 3}


def test_rare_characters_are_spelled_in_bytes_and_teach_nothing() -> None:
    texts = ["word\u4e2dword " * 4, "some more of the common text " * 400]
    fields = {"kind": "byte_fallback_bpe", "vocab_size": 400, "character_coverage": 0.999}
    tokenizer = train_tokenizer(tokenizer_config(fields), texts)
    assert "\u4e2d" not in tokenizer.definition
    assert "wordword" not in tokenizer.definition
    assert tokenizer.decode(tokenizer.encode("\u4e2d")) == "\u4e2d"


@pytest.mark.parametrize("digits", [1, 2, 3])
@pytest.mark.parametrize("kind", ["bpe", "byte_fallback_bpe", "unigram"])
def test_a_token_holds_so_many_digits_at_most(kind: str, digits: int) -> None:
    config = tokenizer_config({"kind": kind, "vocab_size": 500, "digits": digits})
    tokenizer = train_tokenizer(config, [" ".join(map(str, range(99900, 100000)))] * 2)
    pieces = [tokenizer.decode([number]) for number in tokenizer.encode("x 99923999")]
    most = max(sum(map(str.isdigit, piece)) for piece in pieces)
    assert most == digits or (kind == "unigram" and most < digits)


def test_no_token_crosses_from_word_to_word(trained: Trained) -> None:
    bpe = trained("bpe")
    pieces = [bpe.decode([number]) for number in bpe.encode("The quick brown fox over the dog")]
    assert all(" " not in piece[1:] for piece in pieces)


def test_indentation_is_few_tokens(trained: Trained) -> None:
    for name in ("bpe", "byte_fallback_bpe"):
        ids = trained(name).encode("        return")
        assert len(ids) <= 3


def test_the_byte_alphabet_is_the_library_s() -> None:
    assert sorted(BYTE_ALPHABET) == sorted(ByteLevel.alphabet())
    for value, character in enumerate(BYTE_ALPHABET[:128]):
        level = ByteLevel(add_prefix_space=False, use_regex=False)
        assert level.pre_tokenize_str(chr(value)) == [(character, (0, 1))]


def test_the_least_vocabulary_is_bytes_alone() -> None:
    nothing = SpecialTokensConfig(bos=None, eos=None, pad=None, chat=())
    tokenizer = train_tokenizer(BpeConfig(vocab_size=256, special=nothing), ["some text"])
    assert tokenizer.vocab_size == 256
    assert (tokenizer.eos_id, tokenizer.special_tokens) == (None, {})


@pytest.mark.parametrize("texts", [[], [""], iter(())])
def test_an_empty_corpus_is_refused(texts: list[str]) -> None:
    for config in (BpeConfig(vocab_size=300), CharactersConfig(), UnigramConfig(vocab_size=300)):
        with pytest.raises(WorkhorseError, match=r"the corpus has no text \(0 bytes\)"):
            train_tokenizer(config, texts)


@pytest.mark.parametrize("text", ["\0\0\0", "\u200b" * 10])
def test_a_corpus_of_nothing_to_count_is_refused_by_unigram(text: str) -> None:
    with pytest.raises(WorkhorseError, match="has nothing that unigram can learn from"):
        train_tokenizer(UnigramConfig(vocab_size=300), [text])


@pytest.mark.parametrize("config", [BpeConfig(vocab_size=300), CharactersConfig()])
@pytest.mark.parametrize(
    ("texts", "line"),
    [
        ("hello hello hello", "texts='hello hello hello' is one string; pass a list of strings"),
        (b"hello", "texts=b'hello' is one string; pass a list of strings"),
        ([b"hello"], "b'hello' is not a string; pass documents as str"),
        (None, "texts=None is not a list of strings; pass a list"),
    ],
)
def test_a_corpus_is_several_texts(config: Any, texts: Any, line: str) -> None:
    with pytest.raises(WorkhorseError, match=line):
        train_tokenizer(config, texts)


@pytest.mark.parametrize("config", [None, "bpe", {"kind": "bpe", "vocab_size": 300}, BpeConfig])
def test_a_tokenizer_is_trained_from_a_config(config: Any) -> None:
    with pytest.raises(
        WorkhorseError, match=r"config=.* is not a tokenizer config; pass one such as .*_config"
    ):
        train_tokenizer(config, ["some text"])


def test_an_error_of_the_reader_is_not_swallowed() -> None:
    def texts() -> Iterator[str]:
        yield "some text"
        raise WorkhorseError("cannot read b.txt")

    for config in (BpeConfig(vocab_size=300), WordPieceConfig(vocab_size=300)):
        with pytest.raises(WorkhorseError, match=r"^cannot read b\.txt$"):
            train_tokenizer(config, texts())


def test_half_a_surrogate_pair_in_the_corpus_is_refused() -> None:
    with pytest.raises(WorkhorseError, match="document of the corpus has a lone surrogate"):
        train_tokenizer(BpeConfig(vocab_size=300), ["fine", "\udc80"])


def test_bytes_read_no_text() -> None:
    def texts() -> Iterator[str]:
        raise AssertionError("read")
        yield ""

    assert train_tokenizer(BytesConfig(), texts()).vocab_size == 257


def test_progress_counts_the_bytes() -> None:
    seen: list[tuple[int, int | None]] = []
    texts = ["é" * 10, "abc"]
    train_tokenizer(CharactersConfig(), texts, progress=lambda *done: seen.append(done))
    assert seen == [(20, None), (23, None)]


def test_long_texts_are_cut_at_line_ends() -> None:
    text = "x " * (MAX_CHARACTERS // 2 - 5) + "\n" + "y " * (MAX_CHARACTERS // 2) + "z"
    pieces = list(split_documents([text]))
    assert "".join(pieces) == text
    assert [piece[-1] for piece in pieces] == ["\n", " ", "z"]
    assert max(map(len, pieces)) <= MAX_CHARACTERS


def test_a_counted_corpus_can_be_read_again() -> None:
    with counted(iter(["abca", "é\n"])) as corpus:
        assert list(corpus) == list(corpus) == ["abca", "é\n"]
        assert corpus.frequent(0.5, 10) == ["\n", "a"]  # equal counts: the first code point
        assert corpus.frequent(1.0, 2) == ["\n", "a"]
        assert list(corpus.keeping("abc")) == ["abca", "  "]


def test_a_long_run_without_a_space_is_cut_and_told() -> None:
    texts = ["ab cd " + "x" * (2 * MAX_RUN) + "y ef", " " * (MAX_RUN + 1), "z" * (MAX_RUN - 1)]
    with pytest.warns(UserWarning, match="2,048 characters without a space, .*'xxxxx") as told:
        pieces = list(split_documents(texts))
    assert len(told) == 1
    assert "".join(pieces) == "".join(texts)
    assert [len(piece) for piece in pieces] == [6, MAX_RUN, MAX_RUN, 4, MAX_RUN, 1, MAX_RUN - 1]
