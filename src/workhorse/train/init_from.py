"""Training that starts from another model: its weights, its tokenizer, its optimizer's state."""

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
"""The most differing settings that an error names."""


def start_weights(
    init: str,
    decoder: Decoder,
    tell: Callable[[str], None],
    *,
    places: Places = weights_of,
    with_optimizer: bool = False,
) -> Checkpoint | None:
    """Give a decoder the weights of a trained model.

    Args:
        init: the model: a folder or a hub id; with an optimizer, a run directory.
        decoder: takes the weights.
        tell: called with each remark, in one line.
        places: where in the decoder the weights are copied to.
        with_optimizer: whether the optimizer's state will be loaded too.

    Returns:
        If so, the checkpoint of the weights, without them: a run that is still training may have a
        newer one by the time the optimizer's state is read.

    Raises:
        WorkhorseError: there is no such model, or its weights do not fit.
    """
    if with_optimizer:
        run = RunDirectory.at(Path(init))
        checkpoint = run.checkpoint(tell) if run.exists else None
        if checkpoint is None:
            raise WorkhorseError(
                f"init={init} is no run with a whole checkpoint, so it has no optimizer's state; "
                "set init_optimizer=false"
            )
        config = DecoderConfig.from_dict(checkpoint.state["config"])
        _copy_weights(init, decoder, config, checkpoint.model, places)
        return replace(checkpoint, model={})
    stored = open_stored(init)
    trained = stored.load_decoder(dtype=torch.float32)
    for remark in stored.remarks:
        tell(remark)
    _copy_weights(init, decoder, trained.config, weights_of(trained), places)
    return None


def start_optimizer(init: str, checkpoint: Checkpoint, optimizer: Optimizer, kind: str) -> None:
    """Give an optimizer, which is of that kind, the state in a checkpoint of `init`.

    Raises:
        WorkhorseError: the state is of another kind of optimizer, or of another model.
    """
    theirs = checkpoint.state["recipe"]["train"]["optimizer"]["kind"]
    if theirs != kind:
        raise WorkhorseError(
            f"the optimizer's state of init={init} is {theirs}'s, not {kind}'s; set "
            f"init_optimizer=false, or train.optimizer.kind={theirs}"
        )
    try:
        optimizer.load(checkpoint.optimizer)
    except WorkhorseError as error:
        raise WorkhorseError(
            f"the optimizer of init={init} is another ({error}); set init_optimizer=false"
        ) from None


def check_weights(init: str, decoder: Decoder) -> None:
    """Refuse a decoder, on the meta device, that the weights of `init` do not fit.

    The weights are not read.

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
    """Copy the weights of a model with another config; an error names the differences."""
    try:
        load_weights(decoder, weights, places)
    except WorkhorseError as error:
        found = differences(config.to_dict(), decoder.config.to_dict())
        settings = [
            f"model.{'.'.join(path)} is {shown(now)} and there {shown(own)}"
            for path, own, now in islice(found, SETTINGS_SHOWN)
        ]
        raise WorkhorseError(
            f"the weights of init={init} do not fit: {', '.join(settings) or error}; leave out "
            "model to go on with theirs, or init to begin with fresh weights"
        ) from None


def check_tokens(init: str, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer whose ids stand for other tokens than in the training of `init`.

    It may have more tokens, or lack some of the last ones.

    Raises:
        WorkhorseError: an id stands for another token.
    """
    stored = open_stored(init)
    if not stored.has_tokenizer:
        return
    ours = {index: token for token, index in tokenizer.vocabulary.items()}
    for token, index in stored.tokenizer().vocabulary.items():
        if ours.get(index, token) != token:
            raise WorkhorseError(
                f"token {index} is {token!r} for init={init} and {ours[index]!r} for the recipe's "
                "tokenizer, so its weights would mean nothing; leave out tokenizer, or set "
                f"'tokenizer={{kind: file, path: {stored.tokenizer_folder}}}'"
            )
