"""Training from another model: loading its weights, tokenizer and optimizer state."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from workhorse.checkpoints import Checkpoint, Places, RunDirectory, load_weights, weights_of
from workhorse.checkpoints.stored import StoredModel, open_stored
from workhorse.checkpoints.tensors import with_rows
from workhorse.config.overrides import differences
from workhorse.errors import WorkhorseError, shown
from workhorse.nn import Decoder, DecoderConfig
from workhorse.optim.groups import Optimizer
from workhorse.tokenizers import Tokenizer

SETTINGS_SHOWN = 3
"""Maximum number of differing settings that an error lists."""


def start_weights(
    init: str,
    decoder: Decoder,
    notify: Callable[[str], None],
    *,
    whole: DecoderConfig,
    tokenizer: Tokenizer,
    places: Places = weights_of,
    with_optimizer: bool = False,
) -> Checkpoint | None:
    """Copy the weights of a trained model into a decoder, which may have more tokens (`with_rows`).

    Args:
        init: the model: a folder or a hub id; if `with_optimizer`, a run directory.
        decoder: the decoder that receives the weights, or the part of it on this rank.
        notify: called with each notice, in one line.
        whole: config of the whole decoder.
        tokenizer: its tokenizer.
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
        stored, weights = run, checkpoint.model
        config = DecoderConfig.from_dict(checkpoint.state["config"])
    else:
        checkpoint, stored = None, open_stored(init)
        trained = stored.load_decoder(dtype=torch.float32)
        weights, config = weights_of(trained), trained.config
        for remark in stored.remarks:
            notify(remark)
    new = new_tokens(init, stored, tokenizer, notify)
    _copy_weights(init, decoder, config, weights, places, whole=whole, new=new)
    return None if checkpoint is None else replace(checkpoint, model={})


def new_tokens(
    init: str,
    stored: StoredModel | RunDirectory,
    tokenizer: Tokenizer,
    notify: Callable[[str], object],
) -> range:
    """The ids of a tokenizer that the tokenizer of the model `init` does not have."""
    known = stored.tokenizer().vocab_size if stored.has_tokenizer else stored.config.vocab_size
    new = range(known, tokenizer.vocab_size)
    if new:
        notify(f"{len(new)} new tokens start as the mean of the {known:,} tokens of init={init}")
    return new


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
    whole, config = decoder.config, trained.config
    new = range(config.vocab_size, whole.vocab_size)
    _copy_weights(init, decoder, config, weights_of(trained), weights_of, whole=whole, new=new)


def _copy_weights(
    init: str,
    decoder: Decoder,
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    places: Places,
    *,
    whole: DecoderConfig,
    new: range,
) -> None:
    """Copy weights into a decoder.

    `weights` and `config` are of the model `init`, `whole` is the config of the whole decoder, and
    `new` has the ids of the tokens that `init` does not have; see `with_rows`.
    """
    rows = max(whole.vocab_size, config.vocab_size)
    config = config.replace(vocab_size=rows)
    weights = with_rows(weights, rows, new)
    try:
        load_weights(decoder, weights, places)
    except WorkhorseError as error:
        found = differences(config.to_dict(), decoder.config.to_dict())
        settings = [
            f"model.{'.'.join(path)} is {shown(ours)} in the recipe and {shown(theirs)} in init"
            for path, theirs, ours in islice(found, SETTINGS_SHOWN)
        ]
        raise WorkhorseError(
            f"the weights of init={init} do not fit: {', '.join(settings) or error}; remove "
            "model to use their architecture, or init to start from random weights"
        ) from None


def check_tokens(model: str, tokenizer: Tokenizer, *, setting: str, remedy: str) -> None:
    """Check that a tokenizer assigns the same tokens to ids as the tokenizer of a stored model.

    Ids that only one of the two tokenizers has are not compared.

    Args:
        model: the stored model.
        tokenizer: the run's tokenizer.
        setting: name of the setting that names the model, for the message.
        remedy: end of the message; `{folder}` stands for the folder of the model's tokenizer.

    Raises:
        WorkhorseError: an id stands for different tokens.
    """
    stored = open_stored(model)
    if not stored.has_tokenizer:
        return
    ours = {index: token for token, index in tokenizer.vocabulary.items()}
    for token, index in stored.tokenizer().vocabulary.items():
        if ours.get(index, token) != token:
            raise WorkhorseError(
                f"token {index} is {token!r} for {setting}={model} and {ours[index]!r} for the "
                "recipe's tokenizer, so the weights do not match the tokens; "
                + remedy.format(folder=stored.tokenizer_folder)
            )
