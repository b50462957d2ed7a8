"""The tokens before a text in a model's training, which it must be given again later."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workhorse.data.config import DataConfig

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer


@dataclass(frozen=True)
class Beginning:
    """How texts begin for a model."""

    prefix: tuple[int, ...]
    """The tokens at the beginning of every text."""
    start: int | None
    """The token before a text's own first one: the last of `prefix`, or the end of the text before.
    None: there was none."""

    def encode(self, tokenizer: "Tokenizer", prompt: str) -> list[int]:
        """A prompt's tokens; an empty prompt asks for a text from its beginning.

        Empty if nothing stood before a text.
        """
        tokens = [*self.prefix, *tokenizer.encode(prompt)]
        return tokens or ([] if self.start is None else [self.start])


def beginning(tokenizer: "Tokenizer", data: DataConfig | None) -> Beginning:
    """How texts begin for a model.

    Args:
        tokenizer: the model's.
        data: what the model was trained on; None for a model from elsewhere, whose training is
            unknown. Its texts begin as its tokenizer says; if that adds nothing, the token before a
            text is bos or else eos, as in transformers and the lm-evaluation-harness.
    """
    bos = tokenizer.bos_id
    if data is None:
        prefix = tuple(tokenizer.prefix_ids)
        before = beginning_token(tokenizer)
    else:
        prefix = (bos,) if data.bos and bos is not None else ()
        before = tokenizer.eos_id if data.eos else None
    return Beginning(prefix, prefix[-1] if prefix else before)


def beginning_token(tokenizer: "Tokenizer") -> int | None:
    """The token that begins a text if the training is unknown: bos, or else eos."""
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
