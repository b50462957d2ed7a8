"""Adds control tokens to encoded text and ensures that typed text never becomes one.

The `tokenizers` library has an option not to match special tokens in its input. That is not enough,
because their names may also be ordinary tokens of the model. For example, a BPE trained on HTML may
learn to merge `<s>`. So an additional splitting rule cuts the input after the first character of
such a name. No piece of the input can then be the name.

A chat must be encoded as one string, because added and removed spaces depend on the surrounding
text. But only the control tokens that the chat template wrote may be matched in this string. So
`ControlEncoder` uses a tokenizer with the same vocabulary in which the control tokens have random
names (markers) that a user cannot know.
"""

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer, Split

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.backend import ids_of, library_tokenizer, rules
from workhorse.tokenizers.config import BYTE_TOKENS

Ids = tuple[int, ...]


def affixes(post_processor: dict[str, Any] | None) -> tuple[Ids, Ids]:
    """Return the ids that the `post_processor` of a `tokenizer.json` adds before and after inputs.

    Raises:
        WorkhorseError: the post-processor is incomplete, or does more than add tokens.
    """
    try:
        return _affixes(post_processor)
    except (LookupError, TypeError, AttributeError) as error:
        raise WorkhorseError(
            f"the post-processor uses {error}, which is missing; use the original file"
        ) from None


def _affixes(post_processor: dict[str, Any] | None) -> tuple[Ids, Ids]:
    before: Ids = ()
    after: Ids = ()
    for part in rules(post_processor):
        match part:
            case {"type": "TemplateProcessing", "single": single, "special_tokens": tokens}:
                left, right = _around_text(single, tokens)
            case {"type": "BertProcessing" | "RobertaProcessing", "cls": cls, "sep": sep}:
                left, right = (cls[1],), (sep[1],)
            case {"type": "ByteLevel"}:
                left, right = (), ()
            case _:
                raise WorkhorseError(
                    f"the post-processor {part.get('type')!r} is not supported; "
                    "use TemplateProcessing"
                )
        before, after = (*left, *before), (*after, *right)
    return before, after


def _around_text(single: list[dict[str, Any]], tokens: dict[str, Any]) -> tuple[Ids, Ids]:
    sides: tuple[list[int], list[int]] = ([], [])
    texts = 0
    for piece in single:
        if "Sequence" in piece:
            texts += 1
        else:
            sides[min(texts, 1)].extend(tokens[piece["SpecialToken"]["id"]]["ids"])
    if texts != 1:
        raise WorkhorseError(
            f"the post-processor inserts the input {texts} times, not once; use the original file"
        )
    return tuple(sides[0]), tuple(sides[1])


def set_affixes(
    backend: tokenizers.Tokenizer, before: Sequence[str] = (), after: Sequence[str] = ()
) -> None:
    """Set the tokens that a tokenizer adds before and after every input."""
    names = dict.fromkeys((*before, *after))
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{name}:1" for name in before), "$B:1"]
        + [f"{name}:1" for name in after],
        special_tokens=[(name, backend.token_to_id(name)) for name in names],
    )


def reachable(definition: dict[str, Any], also: Iterable[str] = ()) -> list[str]:
    """Return the control and byte tokens that the model could produce from typed text.

    Args:
        definition: the content of a `tokenizer.json`.
        also: tokens that count as control tokens in addition to the special tokens.
    """
    model = definition["model"]
    controls = {token["content"] for token in definition["added_tokens"] if token["special"]}
    controls.update(also)
    if model.get("byte_fallback"):
        controls.update(BYTE_TOKENS)
    return sorted(controls.intersection(_found_in_text(model)))


def _found_in_text(model: dict[str, Any]) -> set[str]:
    """Return the tokens that the model of a `tokenizer.json` can produce, as strings."""
    if model["type"] == "BPE" and not model.get("ignore_merges"):
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        return {left + right for left, right in pairs}
    vocab = model["vocab"]
    return set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}


def guarded(pre_tokenizer: PreTokenizer | None, names: Iterable[str]) -> PreTokenizer | None:
    """Extend a pre-tokenizer so that it cuts every occurrence of a name in the text in two.

    The text then never becomes the token of that name.
    """
    names = [name for name in names if len(name) > 1]
    if not names:
        return pre_tokenizer
    alternatives = "|".join(
        f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in sorted(names)
    )
    cut = Split(Regex(alternatives), behavior="merged_with_previous")
    return pre_tokenizers.Sequence([pre_tokenizer, cut]) if pre_tokenizer is not None else cut


class ControlEncoder:
    """Encodes strings in which each control token is written as its marker (see `mark`).

    Args:
        definition: the content of the tokenizer's `tokenizer.json`.
        also: tokens that count as control tokens in addition to the special tokens.
    """

    def __init__(self, definition: dict[str, Any], also: Iterable[str] = ()) -> None:
        nonce = secrets.token_hex(12)  # random, so that no user can type a marker
        extra = frozenset(also)
        added = definition["added_tokens"]
        controls = [entry for entry in added if entry["special"] or entry["content"] in extra]
        self._spelled = {entry["content"]: f"<{nonce}.{entry['id']}>" for entry in controls}
        self._marker = re.compile(rf"<{nonce}\.\d+>")
        spelled = [
            {**entry, "content": self._spelled.get(entry["content"], entry["content"])}
            for entry in added
        ]
        twin = {**definition, "added_tokens": spelled, "post_processor": None}
        self._backend: tokenizers.Tokenizer = library_tokenizer(json.dumps(twin))
        names = reachable(definition, extra)
        self._backend.pre_tokenizer = guarded(self._backend.pre_tokenizer, names)  # pyright: ignore
        self._id_of: dict[int, int] = {}
        for entry, twin_entry in zip(added, spelled, strict=True):
            number = self._backend.token_to_id(twin_entry["content"])
            assert number is not None
            self._id_of[number] = entry["id"]

    @property
    def names(self) -> Iterable[str]:
        """Names of the control tokens."""
        return self._spelled

    def mark(self, name: str) -> str:
        """Return the marker that stands for a control token in the input of `encode`."""
        return self._spelled[name]

    def encode(self, text: str) -> list[int]:
        """Encode a string. Markers become control tokens, and everything else is typed text."""
        (ids,) = ids_of(self._backend, [text])
        return [self._id_of.get(number, number) for number in ids]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a string, and return where each token begins and ends in it, in characters."""
        ids = self.encode(text)  # reports errors
        found = self._backend.encode(text, add_special_tokens=False)
        return ids, found.offsets

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return where each control token begins and ends in a string for `encode`."""
        return [match.span() for match in self._marker.finditer(text)]
