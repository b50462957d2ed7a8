"""Encoding a text in which control tokens are marked; nothing else in it becomes a control token.

A chat must be encoded as one text: whether a space is added before a word, or removed after a
token, depends on its surroundings. Yet only the control tokens that the template wrote may be found
in it. So they are found under other names: the tokenizer used here has the same vocabulary, but its
control tokens are spelled in a way that nobody who types a message can know.
"""

import json
import secrets
from collections.abc import Iterable
from typing import Any

import tokenizers

from workhorse.tokenizers.backend import ids_of, library_tokenizer
from workhorse.tokenizers.guard import guarded, reachable


class ControlEncoder:
    """Encodes texts whose control tokens were written by `mark`.

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
        """The spelling of a control token in a text for `encode`."""
        return self._spelled[name]

    def encode(self, text: str) -> list[int]:
        """The ids of a text: marked control tokens as such, everything else as typed text."""
        (ids,) = ids_of(self._backend, [text])
        return [self._id_of.get(number, number) for number in ids]
