"""How fast text was generated, told alike by every verb that generates."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workhorse.generate import Completion, Delta


def speed(lengths: Iterable[int], seconds: float, prompt_seconds: float) -> dict[str, Any]:
    """`prompt_seconds`, and `tokens_per_second` of the decoding that followed.

    The first token of a text comes out of reading its prompt, so it is not counted; the rate is
    None where no text has another.

    Args:
        lengths: new tokens of each text.
        seconds: of all of it.
        prompt_seconds: of reading the prompts.
    """
    decoded = sum(max(0, n - 1) for n in lengths)
    rate = decoded / (seconds - prompt_seconds) if decoded else None
    return {"tokens_per_second": rate, "prompt_seconds": prompt_seconds}


def prompt_seconds(results: "Sequence[Completion] | Sequence[Delta]") -> float:
    """How long the prompts of all of them took to read."""
    return sum(result.prompt_seconds for result in results)
