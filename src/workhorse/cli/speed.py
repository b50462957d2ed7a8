"""How fast text was generated, reported alike by every verb that generates."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workhorse.generate import Completion, Delta


def speed(lengths: Iterable[int], seconds: float, prompt_seconds: float) -> dict[str, Any]:
    """`prompt_seconds`, and `tokens_per_second` of the decoding that followed.

    The first token of a text comes from reading its prompt, so it is not counted; the rate is None
    if no text has a second one.

    Args:
        lengths: new tokens of each text.
        seconds: in total.
        prompt_seconds: spent reading the prompts.
    """
    decoded = sum(max(0, n - 1) for n in lengths)
    rate = decoded / (seconds - prompt_seconds) if decoded else None
    return {"tokens_per_second": rate, "prompt_seconds": prompt_seconds}


def prompt_seconds(results: "Sequence[Completion] | Sequence[Delta]") -> float:
    """How long it took to read all prompts."""
    return sum(result.prompt_seconds for result in results)
