"""Makes presets from the fields of a published `config.json`."""

from functools import partial
from typing import Any

from workhorse.models.huggingface import Fields, family
from workhorse.models.preset import Preset
from workhorse.nn import DecoderConfig


class Release:
    """The `config.json` fields that all sizes of a model share; call it to make one size's preset.

    Args:
        model_type: model type in transformers.
        source: where the fields were published.
        shared: fields of `config.json` that all sizes have. Fields that transformers ignores, and
            fields about the tokenizer or training, are omitted.
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
        """Make the preset of one size.

        Args:
            name: see `Preset`.
            parameters: see `Preset`.
            printed: see `Preset`.
            notes: see `Preset`.
            part: True if the preset is only a part of the published model, such as its text model.
            fields: further fields of its `config.json`; they override the shared fields.
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
    """Read the config from the fields of a `config.json`."""
    return family(released["model_type"]).read(Fields(released))
