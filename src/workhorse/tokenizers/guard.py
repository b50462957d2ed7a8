"""Typed text never becomes a control token, whatever the model's vocabulary would allow.

The `tokenizers` library can be told not to look for special tokens in a text. That is not enough:
their names often stand in the model's vocabulary too, where ordinary segmentation finds them
(Unigram and WordPiece take any string they know; a BPE trained on HTML may learn to merge `<s>`).
So where a name can be reached, a last splitting rule cuts the text behind the name's first
character, and no piece of text can be that name.
"""

import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex
from tokenizers.pre_tokenizers import PreTokenizer, Sequence, Split

from workhorse.tokenizers.config import BYTE_TOKENS


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
    return Sequence([pre_tokenizer, cut]) if pre_tokenizer is not None else cut
