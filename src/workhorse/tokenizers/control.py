"""A text in which control tokens are marked is encoded whole, and nothing else becomes one.

A chat is one text to a tokenizer: whether a space is put before a word, or eaten behind a token,
depends on what stands around. So it cannot be encoded in parts, and yet only those control tokens
may be found in it that the template wrote. Here they are found under other names: a tokenizer with
the same vocabulary whose control tokens are spelled in a way that nobody who types can know.
"""

import json
import secrets
from collections.abc import Iterable
from typing import Any

import tokenizers

from workhorse.tokenizers.backend import ids_of, library_tokenizer
from workhorse.tokenizers.guard import guarded, reachable


class ControlEncoder:
    """Encodes texts whose control tokens `mark` has spelled.

    Args:
        definition: of the tokenizer, as in its `tokenizer.json`.
        also: tokens that count as control tokens beside the special ones.
    """

    def __init__(self, definition: dict[str, Any], also: Iterable[str] = ()) -> None:
        nonce = secrets.token_hex(12)
        extra = frozenset(also)
        added = definition["added_tokens"]
        controls = [entry for entry in added if entry["special"] or entry["content"] in extra]
        self._spelled = {entry["content"]: f"<{nonce}.{entry['id']}>" for entry in controls}
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
        """The control tokens."""
        return self._spelled

    def mark(self, name: str) -> str:
        """How to write a control token in a text for `encode`."""
        return self._spelled[name]

    def encode(self, text: str) -> list[int]:
        """The ids of a text: marked control tokens as such, all the rest as typed text."""
        (ids,) = ids_of(self._backend, [text])
        return [self._id_of.get(number, number) for number in ids]
