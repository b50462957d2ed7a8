"""Recipes that start from a trained model: the architecture and tokenizer that `init` gives."""

from typing import Any

from workhorse.checkpoints.stored import open_stored
from workhorse.config.base import ConfigError
from workhorse.errors import WorkhorseError
from workhorse.train.recipe.recipe import is_written_out, written_over


def with_init(fields: dict[str, Any]) -> dict[str, Any]:
    """A recipe's fields with the architecture and the tokenizer of the model it starts from.

    Parsing a `Recipe` reads no other file; this reads the model, or fetches it from the hub.

    Args:
        fields: of a recipe; returned unchanged if they have no `init` or already hold all that it
            gives.

    Raises:
        ConfigError: there is no such model, or `model` names a preset beside it.
    """
    init, changes = fields.get("init"), fields.get("model") or {}
    if not isinstance(init, str) or is_written_out(fields):
        return fields
    if "preset" in changes:
        raise ConfigError(f"init={init} already says the architecture; leave preset out", "model")
    try:
        stored = open_stored(init)
        model = stored.config.to_dict()
    except WorkhorseError as error:
        raise ConfigError(str(error), "init") from None
    tokenizer = {"kind": "file", "path": str(stored.tokenizer_folder)}
    return written_over(fields, model, tokenizer)
