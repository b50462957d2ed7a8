"""All failures of the `tokenizers` library become one-line errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from workhorse.errors import WorkhorseError
from workhorse.tokenizers import Tokenizer, load_tokenizer
from workhorse.tokenizers.backend import library_errors

BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
NEVER_ENDS = {"Regex": "(a+)+$"}
"""A pattern that tries all ways to split a run of a, until the retry limit."""


def definition(model: dict[str, Any] = BPE, **parts: Any) -> str:
    """Return a `tokenizer.json`, as an untrusted author may have written it."""
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": model,
    }
    return json.dumps({**whole, **parts})


WORD_PIECE = {
    "type": "WordPiece",
    "vocab": {"a": 0},
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 100,
}


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (
            definition({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}),
            r"WordLevel error: Missing \[UNK\]",
        ),
        (definition(WORD_PIECE), r"WordPiece error: Missing \[UNK\]"),
        (
            definition({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}),
            "unknown token but `unk_id` is missing",
        ),
        (definition(pre_tokenizer={"type": "FixedLength", "length": 0}), "chunk size must be"),
        (
            definition(normalizer={"type": "Replace", "pattern": NEVER_ENDS, "content": ""}),
            "retry-limit-in-match over",
        ),
    ],
)
@pytest.mark.parametrize("allow_special", [False, True])
def test_a_tokenizer_that_fails_at_a_text_is_one_line(
    file: str, reason: str, allow_special: bool
) -> None:
    tokenizer = Tokenizer(file)
    with pytest.raises(
        WorkhorseError, match=rf"fails on a string \(.*{reason}.*; use the"
    ) as error:
        tokenizer.encode("a" * 50 + "b", allow_special=allow_special)
    assert "\n" not in str(error.value)


def test_an_added_token_that_the_normalizer_fails_at_names_the_file(tmp_path: Path) -> None:
    token = {"content": "a" * 50 + "b", "normalized": True, "special": False}
    token |= {"single_word": False, "lstrip": False, "rstrip": False}
    rule = {"type": "Replace", "pattern": NEVER_ENDS, "content": ""}
    (tmp_path / "tokenizer.json").write_text(definition(normalizer=rule))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"2": token}})
    )
    with pytest.raises(WorkhorseError, match=r"tokenizer\.json: .* fails on an added token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_no_fault_of_the_tokenizer_passes(error: type[BaseException]) -> None:
    with pytest.raises(error), library_errors("the tokenizer fails", "use another"):
        raise error
