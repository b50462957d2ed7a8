"""Checks of a recipe that run before training starts and before anything is written."""

import torch

from workhorse.checkpoints.adapted import AdapterConfig
from workhorse.checkpoints.stored import open_stored
from workhorse.checkpoints.tensors import VOCABULARY_WEIGHTS
from workhorse.data import (
    Batches,
    Document,
    Split,
    check_separators,
    check_sources,
    iterate_documents,
    read_documents,
    stream_of,
)
from workhorse.devices.names import resolve_device, training_dtype
from workhorse.errors import WorkhorseError, shown
from workhorse.memory.capacity import check_fitting
from workhorse.nn import Decoder
from workhorse.optim.groups import check_base_width
from workhorse.parallel.processes import environment
from workhorse.run.init_from import check_weights, new_tokens
from workhorse.tokenizers import train_tokenizer
from workhorse.tokenizers.config import FileConfig
from workhorse.train.recipe.recipe import Recipe
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.report.metrics import check_tracker
from workhorse.train.validation import check_samples
from workhorse.transforms.float8 import check_float8

BYTES_OF_A_TOKEN = 64
"""Upper bound of the bytes per token, for every tokenizer."""


def check_recipe(recipe: Recipe, *, resume: bool = False) -> torch.device:
    """Raise an error for a recipe that cannot be trained on this machine.

    Only the beginning of its training data is read.

    Args:
        recipe: the recipe to train.
        resume: True to continue a run, which already has its tokenizer, data and weights.

    Returns:
        The device to train on.

    Raises:
        WorkhorseError: `recipe` is not a Recipe, the device is missing or does not support the
            settings, a tracker is not installed, the file of the reward is missing, the data or the
            tokenizer cannot be read, or the weights of `init` or the names in `adapter` do not fit
            the model.
    """
    if not isinstance(recipe, Recipe):
        raise WorkhorseError(
            f"recipe must be a Recipe, not {shown(recipe)}; load one from a file with "
            "Recipe.from_dict(workhorse.config.base.read_yaml(path))"
        )
    config = recipe.train
    device = own_gpu(resolve_device(config.device), environment.count_here())
    _check_device(config, device)
    for name in config.trackers:
        check_tracker(name)
    check_samples(config.samples, recipe.data)
    if config.rollouts is not None and config.rollouts.reward is not None:
        config.rollouts.reward.build()  # finds a missing file
    if not resume:
        _check_tokenizer(recipe)
        check_sources(recipe.data)
        _check_model(recipe)
    return device


def recipe_warnings(recipe: Recipe) -> list[str]:
    """List likely mistakes in the recipe of a new run and important defaults, one line each."""
    return [*_context_kept(recipe), *_positions_and_norm(recipe), *_optimizer_chosen(recipe.train)]


def _optimizer_chosen(config: TrainConfig) -> list[str]:
    chosen = config.optimizer
    first, *others = chosen.rates()
    if "optimizer" in config.model_fields_set or not others:
        return []
    rest = ", ".join(f"{rate.setting}={rate.value} for {rate.weights}" for rate in others)
    return [
        f"train.optimizer is not set: using {chosen.kind} ({first.setting}={first.value} for "
        f"{first.weights}, {rest}); set train.optimizer={{kind: adamw}} to use AdamW for all"
    ]


def _positions_and_norm(recipe: Recipe) -> list[str]:
    """Warn about position encodings and a final norm that the recipe does not set explicitly."""
    config = recipe.decoder_config(recipe.model.get("vocab_size") or 1)
    blocks = config.blocks.values()
    added = config.embedding.position
    inside = [block.attention.position for block in blocks]
    turned = [one for one in inside if one.kind != "none"]
    found: list[str] = []
    if turned and added.kind != "none" and "preset" in recipe.model:
        if "position" not in (recipe.model.get("embedding") or {}):
            found.append(
                f"preset {recipe.model['preset']} keeps its {added.kind} positions in addition to "
                f"{turned[0].kind}; set model.embedding.position={{kind: none}} to remove them"
            )
    elif not turned and added.kind == "none":
        said = [config.embedding, *(block.attention for block in blocks)]
        if not any("position" in one.model_fields_set for one in said):
            found.append(
                "the model has no position encoding: only the causal mask depends on the order of "
                "tokens; set model.blocks.NAME.attention.position={kind: rope}, or kind: none if "
                "this is intended"
            )
    ends_in_norm = all(block.kind == "post_norm" for block in blocks)
    if "final_norm" not in config.model_fields_set and not ends_in_norm:
        found.append(
            "the model has no norm after its last layer; set model.final_norm={kind: rms_norm}, "
            "or kind: none if this is intended"
        )
    return found


def _context_kept(recipe: Recipe) -> list[str]:
    preset, seq_len = recipe.model.get("preset"), recipe.train.seq_len
    if preset is None or "max_seq_len" in recipe.model:
        return []
    context = recipe.decoder_config(recipe.model.get("vocab_size") or 1).max_seq_len
    if context == seq_len:
        return []
    return [
        f"preset {preset} has a context of {context:,} tokens, but is trained only on sequences of "
        f"train.seq_len={seq_len}; evaluation and generation will use longer sequences unless you "
        f"set model.max_seq_len={seq_len}"
    ]


def check_length(recipe: Recipe) -> None:
    """Raise WorkhorseError if a data source is too short for one training sequence.

    Sources of more than `BYTES_OF_A_TOKEN * seq_len` bytes are long enough and not tokenized.
    """
    enough = BYTES_OF_A_TOKEN * recipe.train.seq_len
    short: dict[str, list[Document]] = {}
    for name, source in recipe.data.sources.items():
        documents, size = [], 0
        for document in read_documents(source, "train", key=recipe.data.key_of(name)):
            documents.append(document)
            size += len(document.text.encode())
            if size > enough:
                break
        else:
            short[name] = documents
    if not short:
        return
    tokenizer = train_tokenizer(recipe.tokenizer, iterate_documents(recipe.data))
    for name, documents in short.items():
        stream = stream_of(name, documents, tokenizer, recipe.data)
        Batches(
            Split("train", (stream,), (1.0,)),
            seq_len=recipe.train.seq_len,
            batch_size=recipe.train.batch_size,
            packing=recipe.data.packing,
            too_long=recipe.data.too_long,
        )


def own_gpu(device: torch.device, processes: int) -> torch.device:
    """Choose the GPU of this process if several share the machine, and make it the current one.

    The device is returned unchanged if it has an index (`cuda:1`) or is not a CUDA device, or if
    there is only one process.

    Args:
        device: the device in the recipe.
        processes: the number of processes on this machine.

    Raises:
        WorkhorseError: there are fewer GPUs than processes.
    """
    if device.type != "cuda" or device.index is not None or processes == 1:
        return device
    gpus, own = torch.cuda.device_count(), environment.rank_here()
    if own >= gpus:
        raise WorkhorseError(
            f"{processes} processes on this machine need a GPU each, but it has {gpus}; start "
            "fewer processes, or set train.device=cpu"
        )
    torch.cuda.set_device(own)
    return torch.device("cuda", own)


def _check_device(config: TrainConfig, device: torch.device) -> None:
    """Raise WorkhorseError for settings that the device does not support."""
    if config.dtype == "float16" and device.type != "cuda":
        raise WorkhorseError(
            f"dtype=float16 needs CUDA, but the device is {device.type}; use bfloat16 or float32"
        )
    if config.fp8:
        check_float8(device, training_dtype(config.dtype, device), config.seq_len)
    if config.kernel.startswith("flex") and device.type == "cpu":
        raise WorkhorseError("kernel=flex has no backward on a CPU; train with sdpa or eager")
    if config.micro_batch_size == "auto":
        check_fitting(device)


def _check_tokenizer(recipe: Recipe) -> None:
    """Raise WorkhorseError if the tokenizer is unreadable, too large, or lacks bos or eos."""
    if isinstance(recipe.tokenizer, FileConfig):
        tokenizer = train_tokenizer(recipe.tokenizer, ())
        recipe.decoder_config(tokenizer.vocab_size)
        bos, eos = tokenizer.bos_id is not None, tokenizer.eos_id is not None
    else:
        special = recipe.tokenizer.special
        bos, eos = special.bos is not None, special.eos is not None
    check_separators(recipe.data, bos=bos, eos=eos)


def _check_model(recipe: Recipe) -> None:
    """Raise WorkhorseError if kernel, optimizer, `init` or `adapter` do not fit the model."""
    given = recipe.model.get("vocab_size")
    # The tokenizer's vocabulary size is not known yet; weights of `init` have a fixed one.
    of_tokenizer = 1 if recipe.init is None else open_stored(recipe.init).config.vocab_size
    config = recipe.decoder_config(given if isinstance(given, int) else of_tokenizer)
    decoder = config.build(recipe.train.kernel, device="meta")
    check_base_width(decoder, recipe.train.optimizer, drawn=recipe.init is None)
    if recipe.init is not None:
        check_weights(recipe.init, decoder)
    if recipe.adapter is not None:
        recipe.adapter.adapt(decoder, seed=0)
        _check_new_rows(recipe, recipe.adapter, decoder)


def _check_new_rows(recipe: Recipe, adapter: AdapterConfig, decoder: Decoder) -> None:
    """Check that an adapter trains all weights that have rows for new tokens."""
    init, tokenizer = str(recipe.init), recipe.tokenizer
    stored = open_stored(init)
    new = range(stored.config.vocab_size, decoder.config.vocab_size)
    if isinstance(tokenizer, FileConfig) and (tokenizer.add_tokens or tokenizer.chat):
        new = new_tokens(init, stored, train_tokenizer(tokenizer, ()), lambda line: None)
    frozen = {
        name.partition(".")[0]: None
        for name, weight in decoder.named_parameters()
        if name in VOCABULARY_WEIGHTS and not weight.requires_grad
    }
    if new and frozen:
        raise WorkhorseError(
            f"tokens {new.start} to {new.stop - 1} are new, but the adapter does not train their "
            f"rows of {' and '.join(frozen)}; set "
            f"'adapter.also_train=[{', '.join([*adapter.also_train, *frozen])}]'"
        )
