"""Tokenizers as metadata of GGUF files; `tests/campaigns/test_gguf.py` runs llama.cpp on them."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.checkpoints.gguf_cases import make
from tests.tokenizers.conftest import CONFIGS, CORPUS
from workhorse.checkpoints.gguf import GgufFile, vocabulary, write_gguf
from workhorse.checkpoints.gguf.splitting import LLAMA3, QWEN2, SAME, canonical_rule, splitting_rule
from workhorse.checkpoints.gguf.vocabulary import (
    end_metadata,
    end_tokens,
    read_vocabulary,
    tokenizer_metadata,
    vocabulary_remarks,
)
from workhorse.errors import WorkhorseError
from workhorse.tokenizers import Tokenizer, tokenizer_config, train_tokenizer
from workhorse.tokenizers.pieces import BYTE_ALPHABET

gguf = pytest.importorskip("gguf")


def trained(name: str) -> Tokenizer:
    return train_tokenizer(tokenizer_config(CONFIGS[name]), CORPUS)


def test_byte_level_bpe() -> None:
    tokenizer = trained("bpe")
    keys, remarks = tokenizer_metadata(tokenizer, 410)
    definition = json.loads(tokenizer.definition)
    texts, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert keys["tokenizer.ggml.model"] == "gpt2"
    assert len(texts) == len(types) == 410
    assert len(set(texts)) == 410  # llama.cpp rejects duplicate tokens
    for text, number in definition["model"]["vocab"].items():
        assert texts[number] == text
    assert types[tokenizer.eos_id] == 3  # control
    assert types[-1] == 5  # unused: a row of the embedding without a token
    assert all(" " in merge for merge in keys["tokenizer.ggml.merges"])
    assert len(keys["tokenizer.ggml.merges"]) == len(definition["model"]["merges"])
    assert keys["tokenizer.ggml.eos_token_id"] == tokenizer.eos_id
    assert keys["tokenizer.ggml.bos_token_id"] == tokenizer.bos_id
    assert keys["tokenizer.ggml.padding_token_id"] == tokenizer.pad_id
    assert len(remarks) == 1
    assert "combining marks" in remarks[0]  # a remark about our own splitting rule


def test_sentencepiece_like_bpe() -> None:
    tokenizer = trained("byte_fallback_bpe")
    keys, remarks = tokenizer_metadata(tokenizer, tokenizer.vocab_size)
    texts, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    scores = keys["tokenizer.ggml.scores"]
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    assert [types[texts.index(f"<0x{byte:02X}>")] for byte in range(256)] == [6] * 256
    merges = json.loads(tokenizer.definition)["model"]["merges"]
    merged = [scores[texts.index("".join(pair))] for pair in merges]
    assert merged == sorted(merged, reverse=True)  # the first learned merge has the best score
    assert vocabulary.RUNS_OF_SPACES in remarks
    keys, _ = tokenizer_metadata(trained("byte_fallback_bpe without prefix"), 450)
    assert keys["tokenizer.ggml.add_space_prefix"] is False


def test_single_bytes() -> None:
    """The tokenizer has no merges, but llama.cpp requires at least one, and an eos."""
    tokenizer = trained("bytes")
    keys, remarks = tokenizer_metadata(tokenizer, tokenizer.vocab_size)
    assert keys["tokenizer.ggml.merges"] == [vocabulary.NO_MERGE]
    assert keys["tokenizer.ggml.eos_token_id"] == tokenizer.eos_id
    assert remarks == []


def as_llama_cpp(text: str, keys: Mapping[str, Any]) -> list[int]:
    """The ids of a word by merge ranks; merged parts that are not tokens are dropped at the end."""
    ranks = {tuple(merge.split(" ")): n for n, merge in enumerate(keys["tokenizer.ggml.merges"])}
    parts = [BYTE_ALPHABET[value] for value in text.encode()]
    while pairs := [pair for pair in itertools.pairwise(parts) if pair in ranks]:
        at = list(itertools.pairwise(parts)).index(min(pairs, key=ranks.__getitem__))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        keys["tokenizer.ggml.tokens"].index(p) for p in parts if p in keys["tokenizer.ggml.tokens"]
    ]


def test_characters_are_merged_from_their_bytes() -> None:
    tokenizer = trained("characters")
    keys, remarks = tokenizer_metadata(tokenizer, tokenizer.vocab_size)
    assert keys["tokenizer.ggml.model"] == "gpt2"
    assert vocabulary.LEFT_OUT in remarks
    text = "".join(sorted(set("".join(CORPUS)) & set(tokenizer.vocabulary)))
    assert {len(character.encode()) for character in text} == {1, 2, 3, 4}
    assert as_llama_cpp(text, keys) == tokenizer.encode(text)
    assert as_llama_cpp("a\u00f8b", keys) == tokenizer.encode("ab")  # no token for \u00f8


KINDS = ("bpe", "bytes", "byte_fallback_bpe", "byte_fallback_bpe without prefix", "characters")


@pytest.mark.parametrize("name", KINDS)
def test_a_tokenizer_comes_back(name: str) -> None:
    plain = trained(name)
    template = {"default": "{{ messages[0].content }}"}
    tokenizer = Tokenizer(plain.definition, plain.roles, template)
    keys, _ = tokenizer_metadata(tokenizer, tokenizer.vocab_size + 3)
    again = read_vocabulary(keys, tokenizer.vocab_size + 3)
    assert again.definition == tokenizer.definition
    assert again.chat_templates == template
    assert again.roles.items() >= tokenizer.roles.items()


@pytest.mark.parametrize("name", KINDS[:-1])
def test_the_tokenizer_of_keys_alone(name: str) -> None:
    """Files of other programs contain no `tokenizer.json`, so the keys must suffice."""
    tokenizer = trained(name)
    first = [token for token in ("<|bos|>", "<s>") if token in tokenizer.vocabulary]
    tokenizer = tokenizer.with_prefix(*first)
    keys, remarks = tokenizer_metadata(tokenizer, tokenizer.vocab_size + 3)
    others = read_vocabulary({**keys, vocabulary.WHOLE: None}, tokenizer.vocab_size + 3)
    assert others.vocabulary == tokenizer.vocabulary
    assert others.special_tokens == tokenizer.special_tokens
    assert others.prefix_ids == tokenizer.prefix_ids
    for text in ("Hello world, it's 12345!", " two  lines\n\nof text\t", "naïve Zoë 中文 <|eos|>"):
        ids = tokenizer.encode_sequence(text)
        assert others.decode(ids) == tokenizer.decode(ids)
        if vocabulary.RUNS_OF_SPACES not in remarks:
            assert others.encode_sequence(text) == ids


def test_a_tokenizer_json_of_another_vocabulary_is_passed_over() -> None:
    tokenizer = trained("bpe")
    keys, _ = tokenizer_metadata(tokenizer, tokenizer.vocab_size)
    other, _ = tokenizer_metadata(trained("bytes"), tokenizer.vocab_size)
    again = read_vocabulary({**keys, vocabulary.WHOLE: other[vocabulary.WHOLE]}, 400)
    assert again.vocabulary == tokenizer.vocabulary


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"tokenizer.ggml.model": "t5"},
            r"tokenizer kind 't5' is not supported \(only gpt2, llama\)",
        ),
        ({"tokenizer.ggml.pre": "mine"}, "rule 'mine' for splitting words is unknown; "),
        ({"tokenizer.ggml.merges": [1, 2]}, "its tokenizer is damaged"),
        ({"tokenizer.ggml.merges": ["Q"]}, "its tokenizer is damaged"),
        ({"tokenizer.ggml.tokens": 3}, "its tokenizer is damaged"),
        ({"tokenizer.ggml.token_type": [1]}, "its tokenizer is damaged"),
        ({"tokenizer.ggml.bos_token_id": 10**9}, "its tokenizer is damaged"),
    ],
)
def test_a_damaged_tokenizer(changes: dict[str, Any], words: str) -> None:
    keys, _ = tokenizer_metadata(trained("bpe").with_prefix("<|bos|>"), 400)
    with pytest.raises(WorkhorseError, match=rf"^(its tokenizer is )?(llama\.cpp's )?{words}"):
        read_vocabulary({**keys, vocabulary.WHOLE: None, **changes}, 400)


def keys_of_others(**changes: Any) -> dict[str, Any]:
    """The keys of a byte-level tokenizer in a file of another program; None omits one."""
    keys, _ = tokenizer_metadata(trained("bpe"), 400)
    changed = {**keys, vocabulary.WHOLE: None} | {
        f"tokenizer.ggml.{k}": changes[k] for k in changes
    }
    return {key: value for key, value in changed.items() if value is not None}


@pytest.mark.parametrize(
    ("pre", "begins"),
    [("llama-bpe", True), ("llama3", True), ("tekken", True), ("glm4", False), ("gpt-2", False)],
)
def test_rules_that_put_bos_before_a_text(pre: str, begins: bool) -> None:
    """The splitting rule decides about bos only if the file lacks `add_bos_token`."""
    keys = keys_of_others(pre=pre, add_bos_token=None)
    bos = keys["tokenizer.ggml.bos_token_id"]
    assert list(read_vocabulary(keys, 400).prefix_ids) == [bos] * begins
    keys["tokenizer.ggml.add_bos_token"] = not begins
    assert list(read_vocabulary(keys, 400).prefix_ids) == [bos] * (not begins)


def test_every_name_of_a_rule_is_read() -> None:
    for rule, names in SAME.items():
        for name in names.split():
            assert canonical_rule(name) == rule
    text = "it's 12345 + <x> DON'T"
    ids = {
        pre: read_vocabulary(keys_of_others(pre=pre), 400).encode_sequence(text)
        for pre in ("llama3", "llama-bpe", "dbrx", "glm4", "smaug-bpe")
    }
    assert ids["llama3"] == ids["llama-bpe"]
    assert ids["dbrx"] == ids["glm4"] == ids["smaug-bpe"]


def test_a_missing_rule_is_llama_cpp_s_default_with_a_remark() -> None:
    keys = keys_of_others(pre=None)
    assert "tokenizer.ggml.pre is missing" in vocabulary_remarks(keys)[0]
    assert vocabulary_remarks(keys_of_others()) == []
    steps = json.loads(read_vocabulary(keys, 400).definition)["pre_tokenizer"]["pretokenizers"]
    split = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(step["pattern"]["Regex"]), "isolated")
            for step in steps[:-1]
        ]
    )
    words = [word for word, _ in split.pre_tokenize_str("it's x+=12345 (a.b) $5")]
    assert words == [
        "it",
        "'",
        "s",
        " x",
        "+=",
        "123",
        "45",
        " ",
        "(",
        "a",
        ".",
        "b",
        ")",
        " ",
        "$",
        "5",
    ]


@pytest.mark.parametrize(
    ("stop_tokens", "read"),
    [
        ((), ()),
        ((1,), ()),
        ((1, 5), (1, 5)),
        ((7, 1, 5), (1, 7, 5)),
        ((5,), (5,)),
        ((5, 7), (5, 7)),
    ],
)
def test_several_end_tokens(stop_tokens: tuple[int, ...], read: tuple[int, ...]) -> None:
    tokenizer = trained("bpe")
    assert tokenizer.eos_id == 1
    keys, remarks = tokenizer_metadata(tokenizer, 400, stop_tokens)
    assert end_tokens(keys, 400) == read
    assert not any("end tokens" in remark for remark in remarks)


def test_an_eos_that_is_no_stop_token_is_said_and_an_edited_one_counts() -> None:
    keys, remarks = end_metadata((5,), 1)
    assert remarks == [
        "llama.cpp also stops at token 1, the tokenizer's eos, which is not a stop token of the "
        "model"
    ]
    assert end_metadata((5, 1), 1)[1] == end_metadata((), 1)[1] == []
    eos = "tokenizer.ggml.eos_token_id"
    assert end_tokens({**keys, eos: 1}, 400) == (5,)
    assert end_tokens({**keys, eos: 9}, 400) == (9, 5)


def test_more_end_tokens_than_gguf_has_keys() -> None:
    assert end_metadata((1, 2, 3, 4), 1)[1] == ["GGUF has keys for 3 stop tokens; not written: 4"]
    assert end_tokens(end_metadata((1, 2), None)[0], 400) == (1, 2)


def test_no_eos_is_said() -> None:
    tokenizer = trained("bpe")
    without = Tokenizer(tokenizer.definition, {"pad": "<|pad|>"})
    keys, remarks = tokenizer_metadata(without, without.vocab_size)
    assert keys["tokenizer.ggml.eos_token_id"] == without.pad_id
    assert any("tokenizer has no eos" in remark for remark in remarks)


def test_what_stands_around_a_text() -> None:
    tokenizer = trained("bpe")
    keys, _ = tokenizer_metadata(tokenizer, tokenizer.vocab_size)
    assert keys["tokenizer.ggml.add_bos_token"] is False
    definition = json.loads(tokenizer.definition)
    bos = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, bos, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|bos|>": {"id": "<|bos|>", "ids": [tokenizer.bos_id], "tokens": ["<|bos|>"]}
        },
    }
    begun = Tokenizer(json.dumps(definition), tokenizer.roles)
    keys, _ = tokenizer_metadata(begun, begun.vocab_size)
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.ggml.add_eos_token"] is False


def test_the_chat_template_and_stop_tokens_go_along(tmp_path: Path) -> None:
    plain = trained("bpe")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(plain.definition, plain.roles, template)
    path = tmp_path / "model.gguf"
    write_gguf(path, make("llama"), model_type="llama", tokenizer=tokenizer, stop_tokens=(5,))
    assert GgufFile(path).stop_tokens == (5,)
    field = gguf.GGUFReader(path).get_field("tokenizer.chat_template")
    assert field.contents() == template


@pytest.mark.parametrize("name", ["wordpiece", "unigram"])
def test_tokenizers_that_llama_cpp_has_not(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(WorkhorseError, match=r"llama\.cpp does not support this kind of tokenizer"):
        write_gguf(path, make("llama"), model_type="llama", tokenizer=trained(name))
    assert not path.exists()


def test_a_tokenizer_larger_than_the_embedding() -> None:
    with pytest.raises(WorkhorseError, match="400 tokens and the embedding 64 rows"):
        tokenizer_metadata(trained("bpe"), 64)


def rule(pre_tokenizer: Any, *, ignore_merges: bool = False, normalizer: Any = None) -> str:
    model = {"ignore_merges": ignore_merges, "merges": [["a", "b"]]}
    definition = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model}
    return splitting_rule(definition)[0]


def split(regex: str, **changes: Any) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return step | changes


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def test_rules_are_known_by_what_they_do() -> None:
    """A splitting rule is recognised in each of its equivalent spellings."""
    sequence = {"type": "Sequence", "pretokenizers": [split(LLAMA3), BYTES]}
    assert rule(sequence, ignore_merges=True) == "llama-bpe"
    assert rule(sequence) == "smaug-bpe"
    removed = split(QWEN2, behavior="Removed", invert=True)
    assert rule({"type": "Sequence", "pretokenizers": [removed, BYTES]}) == "qwen2"
    spelled = QWEN2.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)")
    assert rule(split(spelled)) == "qwen2"
    literal = QWEN2.replace(r"\r\n", "\r\n")
    assert rule(split(literal)) == "qwen2"
    assert rule(BYTES | {"use_regex": True}) == "gpt-2"


@pytest.mark.parametrize(
    "step",
    [
        split(r"\w+"),
        split(QWEN2, behavior="MergedWithNext"),
        split(QWEN2, behavior="Removed"),
        BYTES | {"use_regex": True, "add_prefix_space": True},
        {"type": "Whitespace"},
        {"type": "Sequence", "pretokenizers": [split(QWEN2), split(LLAMA3)]},
    ],
    ids=str,
)
def test_unknown_rules_are_refused(step: Any) -> None:
    with pytest.raises(WorkhorseError, match="no rule that splits words like this tokenizer"):
        rule(step)


def test_normalisation() -> None:
    definition = {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": split(QWEN2),
        "model": {"ignore_merges": False, "merges": [["a", "b"]]},
    }
    assert "NFC" in splitting_rule(definition)[1][0]
    with pytest.raises(WorkhorseError, match="does not support the normalizer"):
        rule(split(QWEN2), normalizer={"type": "Lowercase"})
