"""Control tokens: where they are added, and why typed text never becomes one.

The `tokenizers` library can be told not to look for special tokens in a text. That is not enough:
their names often stand in the model's vocabulary too, where ordinary segmentation finds them
(Unigram and WordPiece take any string they know; a BPE trained on HTML may learn to merge `<s>`).
So where a name can be reached, a last splitting rule cuts the text behind the name's first
character, and no piece of text can be that name.

A chat must be encoded as one text: whether a space is added before a word, or removed after a
token, depends on its surroundings. Yet only the control tokens that the template wrote may be found
in it. So they are found under other names: the tokenizer used here has the same vocabulary, but its
control tokens are spelled in a way that nobody who types a message can know.
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
    """The ids before and after a text, by the `post_processor` of a `tokenizer.json`.

    Raises:
        WorkhorseError: the post-processor does anything else with a text.
    """
    try:
        return _affixes(post_processor)
    except (LookupError, TypeError, AttributeError) as error:
        raise WorkhorseError(
            f"a post-processor without {error}, which it uses; give the original file"
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
                    f"the post-processor {part.get('type')!r} is unknown; use TemplateProcessing"
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
        raise WorkhorseError(f"the post-processor uses a text {texts} times; it must be once")
    return tuple(sides[0]), tuple(sides[1])


def set_affixes(
    backend: tokenizers.Tokenizer, before: Sequence[str] = (), after: Sequence[str] = ()
) -> None:
    """Replace the tokens that stand before and after every text."""
    names = dict.fromkeys((*before, *after))
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{name}:1" for name in before), "$B:1"]
        + [f"{name}:1" for name in after],
        special_tokens=[(name, backend.token_to_id(name)) for name in names],
    )


def reachable(definition: dict[str, Any], also: Iterable[str] = ()) -> list[str]:
    """The control and byte tokens of a `tokenizer.json` that its model could find in a text.

    Tokens named in `also` count as control tokens too.
    """
    model = definition["model"]
    controls = {token["content"] for token in definition["added_tokens"] if token["special"]}
    controls.update(also)
    if model.get("byte_fallback"):
        controls.update(BYTE_TOKENS)
    return sorted(controls.intersection(_found_in_text(model)))


def _found_in_text(model: dict[str, Any]) -> set[str]:
    """The strings that a model can find as a token."""
    if model["type"] == "BPE" and not model.get("ignore_merges"):
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        return {left + right for left, right in pairs}
    vocab = model["vocab"]
    return set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}


def guarded(pre_tokenizer: PreTokenizer | None, names: Iterable[str]) -> PreTokenizer | None:
    """A pre-tokenizer after which none of `names` is a piece of text, or a part of one."""
    names = [name for name in names if len(name) > 1]
    if not names:
        return pre_tokenizer
    alternatives = "|".join(
        f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in sorted(names)
    )
    cut = Split(Regex(alternatives), behavior="merged_with_previous")
    return pre_tokenizers.Sequence([pre_tokenizer, cut]) if pre_tokenizer is not None else cut


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
