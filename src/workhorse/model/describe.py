"""`describe`: what a model is, by its config and the headers of its files."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workhorse.checkpoints import RunDirectory
from workhorse.checkpoints.on_disk import weights_on_disk
from workhorse.checkpoints.stored import (
    StoredModel,
    is_stored,
    model_name,
    no_such_model,
    open_stored,
)
from workhorse.devices.memory import size
from workhorse.errors import WorkhorseError
from workhorse.models import find_preset, preset_names
from workhorse.models.describe import details, facts
from workhorse.tokenizers import Tokenizer


def describe(
    model: str | Path, *, tell: Callable[[str], object] = lambda line: None
) -> dict[str, Any]:
    """A model's shape, parameters, weights on disk, tokenizer and config, in plain data.

    Args:
        model: what `load` takes. Of a model on the hub all but the weights is fetched.
        tell: called with the commit that a name on the hub stands for.

    Returns:
        As `workhorse.models.describe.details` for a preset. For a stored model, beside what its
        config tells: `weights` (`bytes`, and `types`, bytes of each; None where there are none),
        `step` (of a run's newest checkpoint), `tokenizer` (None where there is none), `notes`, and
        `stored`, the same in sentences.

    Raises:
        WorkhorseError: there is no such model, or its files cannot be read.
    """
    name = model_name(model)
    if not is_stored(name):
        if name in preset_names():
            return details(find_preset(name))
        raise no_such_model(name)
    stored = open_stored(model, tell, weights=False)
    config = stored.config
    found = facts(name, stored.kind, config)
    if stored.family is not None:
        found["exports_as"] = stored.family.architecture
    found |= {"step": None, "weights": None, "notes": list(stored.remarks)}
    if isinstance(stored, RunDirectory):
        found["step"] = next(iter(stored.store().steps()), None)
    if held := weights_on_disk(stored):
        types = {name: of_type.bytes for name, of_type in held.items()}
        found["weights"] = {"bytes": sum(types.values()), "types": types}
    found["tokenizer"] = _tokenizer(stored)
    return found | {"stored": list(_sentences(found)), "config": config.to_dict()}


def _tokenizer(stored: StoredModel) -> dict[str, Any] | None:
    if not stored.has_tokenizer:
        return None
    try:
        tokenizer: Tokenizer = stored.tokenizer()
    except WorkhorseError as error:  # the model is there all the same
        return {"error": str(error)}
    return {
        "vocab_size": tokenizer.vocab_size,
        "special_tokens": len(tokenizer.special_tokens),
        "chat_template": bool(tokenizer.chat_templates),
        "fingerprint": tokenizer.fingerprint,
    }


def _sentences(found: dict[str, Any]) -> Iterator[str]:
    step = f", step {found['step']:,}" if found["step"] is not None else ""
    yield f"Stored as: {found['kind']}{step}."
    if found["weights"] is None:
        yield "Weights: none here."
    else:
        types = " and ".join(found["weights"]["types"])
        yield f"Weights: {size(found['weights']['bytes'])} in {types}."
    match found["tokenizer"]:
        case None:
            yield "Tokenizer: none."
        case {"error": reason}:
            yield f"Tokenizer: cannot be read: {reason}."
        case tokenizer:
            template = "with" if tokenizer["chat_template"] else "without"
            yield (
                f"Tokenizer: {tokenizer['vocab_size']:,} tokens, {tokenizer['special_tokens']} of "
                f"them special, {template} a chat template, {tokenizer['fingerprint'][:16]}."
            )
