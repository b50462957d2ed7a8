"""Training from another model: loading its weights, tokenizer and optimizer state."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from workhorse.checkpoints import Checkpoint, Places, RunDirectory, load_weights, weights_of
from workhorse.checkpoints.stored import open_stored
from workhorse.errors import WorkhorseError, shown
from workhorse.nn import Decoder, DecoderConfig
from workhorse.optim.groups import Optimizer
from workhorse.tokenizers import Tokenizer
from workhorse.train.resume import differences

SETTINGS_SHOWN = 3
"""Maximum number of differing settings that an error lists."""


def start_weights(
    init: str,
    decoder: Decoder,
    notify: Callable[[str], None],
    *,
    places: Places = weights_of,
    with_optimizer: bool = False,
) -> Checkpoint | None:
    """Copy the weights of a trained model into a decoder.

    Args:
        init: the model: a folder or a hub id; if `with_optimizer`, a run directory.
        decoder: the decoder that receives the weights.
        notify: called with each notice, in one line.
        places: returns the tensors of the decoder that the weights are copied to.
        with_optimizer: True if the optimizer's state will be loaded too.

    Returns:
        If `with_optimizer`, the checkpoint that the weights were read from, without the weights.
        The optimizer state must come from the same checkpoint, and a run that is still training may
        save a newer one meanwhile. Otherwise None.

    Raises:
        WorkhorseError: there is no such model, or its weights do not fit.
    """
    if with_optimizer:
        run = RunDirectory.at(Path(init))
        checkpoint = run.checkpoint(notify) if run.exists else None
        if checkpoint is None:
            raise WorkhorseError(
                f"init={init} is not a run with an intact checkpoint, so it has no optimizer "
                "state; set init_optimizer=false"
            )
        config = DecoderConfig.from_dict(checkpoint.state["config"])
        _copy_weights(init, decoder, config, checkpoint.model, places)
        return replace(checkpoint, model={})
    stored = open_stored(init)
    trained = stored.load_decoder(dtype=torch.float32)
    for remark in stored.remarks:
        notify(remark)
    _copy_weights(init, decoder, trained.config, weights_of(trained), places)
    return None


def start_optimizer(init: str, checkpoint: Checkpoint, optimizer: Optimizer, kind: str) -> None:
    """Load the optimizer state from a checkpoint of the run that training starts from.

    `kind` is the kind of the optimizer that receives the state, such as `adamw`.

    Raises:
        WorkhorseError: the state belongs to another kind of optimizer or to another model.
    """
    theirs = checkpoint.state["recipe"]["train"]["optimizer"]["kind"]
    if theirs != kind:
        raise WorkhorseError(
            f"init={init} has the optimizer state of {theirs}, not of {kind}; set "
            f"init_optimizer=false, or train.optimizer.kind={theirs}"
        )
    try:
        optimizer.load(checkpoint.optimizer)
    except WorkhorseError as error:
        raise WorkhorseError(
            f"the optimizer state of init={init} does not fit ({error}); set init_optimizer=false"
        ) from None


def check_weights(init: str, decoder: Decoder) -> None:
    """Check that the weights of the model `init` fit a decoder, without reading the weights.

    The decoder is on the meta device.

    Raises:
        WorkhorseError: there is no such model, or names or shapes differ.
    """
    trained = open_stored(init).config.build(device="meta")
    _copy_weights(init, decoder, trained.config, weights_of(trained))


def _copy_weights(
    init: str,
    decoder: Decoder,
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    places: Places = weights_of,
) -> None:
    """Copy weights into a decoder; if they do not fit, raise an error with differing settings."""
    try:
        load_weights(decoder, weights, places)
    except WorkhorseError as error:
        found = differences(config.to_dict(), decoder.config.to_dict())
        settings = [
            f"model.{'.'.join(path)} is {shown(now)} in the recipe and {shown(own)} in init"
            for path, own, now in islice(found, SETTINGS_SHOWN)
        ]
        raise WorkhorseError(
            f"the weights of init={init} do not fit: {', '.join(settings) or error}; remove "
            "model to use their architecture, or init to start from random weights"
        ) from None


def check_tokens(init: str, tokenizer: Tokenizer) -> None:
    """Check that a tokenizer assigns the same tokens to ids as the tokenizer of the model `init`.

    Ids that only one of the two tokenizers has are not compared.

    Raises:
        WorkhorseError: an id stands for different tokens.
    """
    stored = open_stored(init)
    if not stored.has_tokenizer:
        return
    ours = {index: token for token, index in tokenizer.vocabulary.items()}
    for token, index in stored.tokenizer().vocabulary.items():
        if ours.get(index, token) != token:
            raise WorkhorseError(
                f"token {index} is {token!r} for init={init} and {ours[index]!r} for the recipe's "
                "tokenizer, so the weights do not match the tokens; remove tokenizer, or set "
                f"'tokenizer={{kind: file, path: {stored.tokenizer_folder}}}'"
            )
