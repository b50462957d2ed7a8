"""A preset out of the fields of a published `config.json`."""

from functools import partial
from typing import Any

from workhorse.models.huggingface import Fields, family
from workhorse.models.preset import Preset
from workhorse.nn import DecoderConfig


class Release:
    """What the sizes of a family share; a call is one size.

    Args:
        model_type: of transformers, whose reader makes the config.
        source: where the fields were published.
        shared: fields of `config.json` that all sizes have. What transformers ignores, and what
            tells of a tokenizer or of training, is left out.
    """

    def __init__(self, model_type: str, source: str, **shared: Any) -> None:
        self.source = source
        self.shared = {"model_type": model_type, **shared}

    def __call__(
        self,
        name: str,
        parameters: int,
        *,
        printed: str = "",
        notes: tuple[str, ...] = (),
        part: bool = False,
        **fields: Any,
    ) -> Preset:
        """One size.

        Args:
            name: see `Preset`.
            parameters: see `Preset`.
            printed: see `Preset`.
            notes: see `Preset`.
            part: whether the model is a part of what was published.
            fields: of its `config.json`; over those that are shared.
        """
        released = {**self.shared, **fields}
        return Preset(
            name,
            partial(read_released, released),
            parameters=parameters,
            exactness="derived" if part else "released",
            printed=printed,
            source=self.source,
            notes=notes,
            released=released,
        )


def read_released(released: dict[str, Any]) -> DecoderConfig:
    """The config that a `config.json` says."""
    return family(released["model_type"]).read(Fields(released))
