"""The tokens before and after every whole text: bos, eos, or none."""

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import processors

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.backend import rules

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
