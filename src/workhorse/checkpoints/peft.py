"""Adapters in the format of PEFT 0.21: `adapter_config.json` and `adapter_model.safetensors`.

PEFT names tensors after the modules of the transformers model. The rules of the model family say
which rows of our matrices are rows of theirs, and each row of B belongs to the same row of W:

    W of theirs = rows of (W_1, W_2, …)   so   B of theirs = the same rows of (B_1, B_2, …)

If their matrix holds several of ours, such as q, k and v, one A serves all; see `with_shared_a`.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workhorse.checkpoints.adapted import copy_adapter
from workhorse.checkpoints.huggingface.load import ADAPTER_FILE
from workhorse.checkpoints.huggingface.tensor_folder import TensorFolder
from workhorse.checkpoints.low_rank import Update, updates_of, with_shared_a
from workhorse.checkpoints.model_folder import make_folder
from workhorse.checkpoints.peft_config import (
    PeftConfig,
    matching,
    modules_of,
    pattern,
    read_config,
    shortest,
    written_config,
)
from workhorse.checkpoints.runs.manifest import Disk
from workhorse.checkpoints.tensors import check_numbers
from workhorse.errors import WorkhorseError
from workhorse.files.safetensors import fill, lay_out, whole
from workhorse.models.huggingface import Family
from workhorse.models.huggingface.modules import MATRIX, Modules, put
from workhorse.models.huggingface.moves import Move, Shape
from workhorse.nn import Decoder
from workhorse.transforms.adapters import adapter_parameters, adapters_of, add_adapter
from workhorse.transforms.lora import LoraConfig, ends_with

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX, BASE_LAYER = "base_model.model.", ".base_layer"
A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
EMBEDDING, HEAD, ROUTER = "embedding.tokens.weight", "head.proj.weight", "router.proj.weight"
THEIR_HEAD = "lm_head"
"""The target whose frozen weight PEFT saves beside the adapter."""
TAKEN_FOR_EXPERTS = (
    *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe"),
    *("exaone_moe", "glm4_moe", "glm4_moe_lite", "hunyuan_v1_moe", "solar_open"),
)
"""Model types with feed-forwards beside the experts that PEFT takes for parts of the experts,
because experts had these names in transformers 4."""
FEED_FORWARD = (".gate_proj.weight", ".up_proj.weight", ".down_proj.weight")
OTHER_BASE = "give the base that the adapter was trained on"


def write_peft(
    folder: Path,
    decoder: Decoder,
    family: Family,
    base: str,
    *,
    name: str = "default",
    tokenizer: "Tokenizer | None" = None,
) -> int:
    """Write an adapter as a PEFT directory, completely or not at all.

    Args:
        folder: a new or empty folder.
        decoder: the decoder with the adapter.
        family: the model type of the base.
        base: path or hub id of the base, as PEFT will load it.
        name: the name of the adapter.
        tokenizer: the tokenizer to write beside the adapter, as trainers of transformers do.

    Returns:
        The number of elements of the written tensors.

    Raises:
        WorkhorseError: PEFT cannot express the adapter, or a value is infinite or NaN.
    """
    config, modules = adapters_of(decoder)[name], Modules(decoder.config, family)
    our_updates, trained = updates_of(decoder, name), _trained_weights(decoder, name)
    updates: dict[str, Update] = {}
    targets: dict[str, Update] = {}
    tied = decoder.config.head.tied and EMBEDDING in trained
    tensors: dict[str, Tensor] = {}
    saved: list[str] = []
    transposed = False  # the value of the last layer, since PEFT sets it layer by layer
    for move in modules.moves:
        if not trained.keys().isdisjoint(move.ours):
            tensors |= _weights_to_theirs(move, trained)
            saved += [] if tied and HEAD in move.ours else move.theirs
        if not our_updates.keys().isdisjoint(move.ours):
            parts = [our_updates.get(path) for path in move.ours]
            update = _to_theirs(modules, move, parts, config.divisor)
            targets[_target(move)] = updates[move.theirs[0]] = update
            if _target(move) != move.theirs[0]:
                transposed = modules.layout(move)[0]
    for theirs, update in updates.items():
        key = _wrapped(theirs, updates)
        tensors[key + A], tensors[key + B] = _flat(update)
        if update.magnitude is not None:
            tensors[key + MAGNITUDE] = update.magnitude
        if key == THEIR_HEAD:
            tensors[f"{key}{BASE_LAYER}.weight"] = decoder.head.proj.weight.detach()
    for key, value in tensors.items():
        check_numbers(key, value, "adapter")
    weights = [weight for move in modules.moves for weight in move.theirs]
    data = written_config(config, targets, saved, weights) | {
        "base_model_name_or_path": base,
        "ensure_weight_tying": tied,
        "fan_in_fan_out": transposed,
    }

    def write(temporary: Path) -> None:
        _write_files(temporary, data, tensors, tokenizer, family.model_type)

    make_folder(folder, write)
    return sum(value.numel() for value in tensors.values())


def _write_files(
    folder: Path,
    data: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer: "Tokenizer | None",
    model_type: str,
) -> None:
    """Write the config and the weights of an adapter, and a tokenizer, into a folder."""
    Disk().write_text(folder / ADAPTER_FILE, json.dumps(data, indent=2, sort_keys=True))
    slices = whole({PREFIX + key: value.contiguous() for key, value in tensors.items()})
    lay_out(folder / WEIGHTS, slices)
    fill(folder / WEIGHTS, slices)
    if tokenizer is not None:
        tokenizer.save(folder, model_type=model_type)


def _target(move: Move) -> str:
    """The module whose weight PEFT updates, or the parameter, if it is of experts or a router."""
    name = move.theirs[0]
    return name if move.ours[0].endswith(ROUTER) else name.removesuffix(".weight")


def _weights_to_theirs(move: Move, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if missing := sorted(set(move.ours) - trained.keys()):
        raise WorkhorseError(
            f"also_train: {move.theirs[0]} also holds {missing[0]}; add it to the list"
        )
    values = put(move, [trained[path] for path in move.ours])
    return dict(zip(move.theirs, values, strict=True))


def _trained_weights(decoder: Decoder, name: str) -> dict[str, Tensor]:
    """The weights of `also_train` by name. A tied head is listed too, since PEFT stores both."""
    parameters = adapter_parameters(decoder, name).items()
    trained = {path: one.detach() for path, one in parameters if ".adapters." not in path}
    if decoder.config.head.tied and EMBEDDING in trained:
        trained[HEAD] = trained[EMBEDDING]
    return trained


def _to_theirs(
    modules: Modules,
    move: Move,
    updates: Sequence[Update | None],
    divisor: Callable[[int], float],
) -> Update:
    """Join the updates of our weights to the update of the weight in memory that holds them."""
    theirs = move.theirs[0]
    if theirs.endswith(FEED_FORWARD) and modules.family.model_type in TAKEN_FOR_EXPERTS:
        raise WorkhorseError(
            f"PEFT takes an adapter of {theirs} for one of the experts; remove it from the targets"
        )
    transposed, swapped = modules.layout(move)
    shapes = [modules.shapes[name] for name in move.ours]
    a, parts, alpha = with_shared_a(updates, shapes, divisor)
    (b,) = put(move, parts)
    b = b.mT if transposed else b
    if swapped:  # PEFT takes the first axis of the matrices for the axis of outputs
        a, b = b.mT, a.mT
    magnitudes = [one.magnitude for one in updates if one and one.magnitude is not None]
    if not magnitudes:
        return Update(a, b, None, alpha)
    if len(magnitudes) < len(updates) or _target(move) == theirs:
        raise WorkhorseError(
            f"PEFT has no DoRA for {theirs} unless the adapter covers it whole, or for "
            "experts and routers; train the adapter with dora=false"
        )
    return Update(a, b, put(move, magnitudes)[0], alpha)


def add_peft(decoder: Decoder, folder: Path, family: Family, *, name: str = "default") -> None:
    """Add the adapter in a PEFT directory to a decoder, in place, and make it the active one.

    Args:
        decoder: the base, which may be quantised.
        folder: the directory.
        family: the model type of the base.
        name: the name that the adapter gets.

    Raises:
        WorkhorseError: a file is missing or damaged, the adapter has an option that is not
            supported, or it belongs to another base.
    """
    config = read_config(folder / ADAPTER_FILE)
    if not (folder / WEIGHTS).exists():
        if not (folder / PICKLE).exists():
            raise WorkhorseError(f"{folder / WEIGHTS} does not exist; fetch the adapter again")
        raise WorkhorseError(
            f"{folder} has its weights only as {PICKLE}, a format that can run code when it is "
            "read; if you trust it, save it again with PEFT's save_pretrained"
        )
    try:
        _add(decoder, config, TensorFolder(folder, WEIGHTS), family, name)
    except WorkhorseError as error:
        raise WorkhorseError(f"{folder}: {error}") from None


def _add(
    decoder: Decoder, config: PeftConfig, stored: TensorFolder, family: Family, name: str
) -> None:
    update_keys, weight_keys = _by_weight(config, stored, Modules(decoder.config, family))
    modules = Modules(decoder.config, family, [*update_keys, *weight_keys])
    updates: dict[str, Update] = {}
    trained: dict[str, Tensor] = {}
    for move in modules.moves:
        if update_keys.keys() >= set(move.theirs):
            keys = [update_keys.pop(theirs) for theirs in move.theirs]
            _add_once(updates, _to_ours(modules, move, keys, config, stored), keys[0] + A)
        if weight_keys.keys() >= set(move.theirs):
            keys = [weight_keys.pop(theirs) for theirs in move.theirs]
            weights = _weights_to_ours(modules, move, keys, stored)
            if _is_trained(move, config):
                _add_once(trained, weights, keys[0])
            else:
                _check_unchanged(decoder, weights)
    if left := [*update_keys] or [*weight_keys]:
        group = next((move.theirs for move in modules.moves if left[0] in move.theirs), ())
        absent = [weight for weight in group if weight not in left]
        raise WorkhorseError(
            f"the file has {left[0]}, but not {absent[0]}; save the adapter again"
            if absent
            else f"{left[0]} is not a weight of this {family.model_type} model; {OTHER_BASE}"
        )
    _check_targets(config, modules.moves, updates)
    untied = config.replace(ensure_weight_tying=False)  # it adds the head only to the embedding
    saved = (move for move in modules.moves if _is_trained(move, untied))
    if missing := [move.theirs[0] for move in saved if not trained.keys() >= set(move.ours)]:
        raise WorkhorseError(
            f"modules_to_save names {missing[0]}, which is not in the file; save the adapter again"
        )
    if decoder.config.head.tied:
        _join_tied(trained, config)
    add_adapter(decoder, _lora_config(config, modules, updates, trained), name=name)
    for path, update in updates.items():
        adapter = f"{path}.adapters.{name}"
        trained |= {f"{adapter}.lora_a.weight": update.a, f"{adapter}.lora_b.weight": update.b}
        if update.magnitude is not None:
            trained[f"{adapter}.magnitude"] = update.magnitude
    copy_adapter(decoder, trained, name)


def _add_once(found: dict[str, Any], more: Mapping[str, Any], key: str) -> None:
    """Add weights from the tensor `key`, in place; raise an error if one is already there."""
    if not found.keys().isdisjoint(more):
        raise WorkhorseError(
            f"tensor {key!r}: the file has another tensor for the same weight; save the adapter "
            "again"
        )
    found.update(more)


def _check_targets(config: PeftConfig, moves: Iterable[Move], updates: Mapping[str, Any]) -> None:
    """Check that each module that `target_modules` names has an update."""
    targets = config.targets()
    for move in moves:
        module = move.theirs[0].removesuffix(".weight")
        named = module != move.theirs[0] and any(ends_with(module, target) for target in targets)
        if named and updates.keys().isdisjoint(path.removesuffix(".weight") for path in move.ours):
            raise WorkhorseError(
                f"target_modules names {module}, which is not in the file; save the adapter again"
            )


def _is_trained(move: Move, config: PeftConfig) -> bool:
    """True if `modules_to_save` names the module of a weight that is saved in full."""
    module = move.theirs[0].rpartition(".")[0]
    tied_head = HEAD in move.ours and config.ensure_weight_tying
    return tied_head or any(module.endswith(end) for end in config.modules_to_save or ())


def _join_tied(trained: dict[str, Tensor], config: PeftConfig) -> None:
    """Keep one weight for a tied embedding and head, in place; PEFT stores both."""
    both = [trained.pop(path) for path in (EMBEDDING, HEAD) if path in trained]
    if not both:
        return
    if not config.ensure_weight_tying or not torch.equal(both[0], both[-1]):
        raise WorkhorseError(
            "modules_to_save trains head and embedding apart, which share one weight in this "
            "base; train the adapter with ensure_weight_tying=True"
        )
    trained[EMBEDDING] = both[0]


def _lora_config(
    config: PeftConfig, modules: Modules, updates: Mapping[str, Update], trained: Iterable[str]
) -> LoraConfig:
    """The options of an adapter with these updates, by layer, and these trained weights."""
    all_modules = modules_of(modules.shapes)
    ranks = {path: update.rank for path, update in updates.items()}
    alphas = {path: float(update.alpha) for path, update in updates.items()}
    return LoraConfig(
        rank=config.r,
        alpha=config.lora_alpha,
        ranks=pattern(ranks, config.r, all_modules),
        alphas=pattern(alphas, float(config.lora_alpha), all_modules),
        scaling="sqrt_rank" if config.use_rslora else "rank",
        dropout=config.lora_dropout,
        dora=config.use_dora,
        targets=tuple(shortest(updates, all_modules)),
        also_train=tuple(dict.fromkeys(path.rpartition(".")[0] for path in trained)),
    )


def _by_weight(
    config: PeftConfig, stored: TensorFolder, modules: Modules
) -> tuple[dict[str, str], dict[str, str]]:
    """Map the names of weights to the keys of the stored tensors.

    Returns:
        For each weight with an update, the key of the update without the ends of A and B. For each
        weight that is stored in full, its key.
    """
    theirs = (name for move in modules.moves for name in move.theirs)
    stacks = [name for name in theirs if not name.endswith(".weight")]
    update_keys: dict[str, str] = {}
    weight_keys: dict[str, str] = {}
    for key in stored.shapes:
        inner = key.removeprefix(PREFIX)
        if ".lora_embedding_" in inner:
            raise WorkhorseError(
                f"tensor {key!r}: LoRA of an embedding is not supported; train it with "
                "modules_to_save"
            )
        if inner.endswith(MAGNITUDE) and not config.use_dora:
            raise WorkhorseError(
                f"tensor {key!r} does not belong to an adapter with use_dora=false; save the "
                "adapter again"
            )
        if end := next((end for end in (A, B, MAGNITUDE) if inner.endswith(end)), None):
            weight = _weight_of(inner.removesuffix(end), config, stacks)
            if update_keys.get(weight) != key.removesuffix(end):  # else another end added it
                _add_once(update_keys, {weight: key.removesuffix(end)}, key)
        else:
            _add_once(weight_keys, {inner.replace(f"{BASE_LAYER}.", "."): key}, key)
    return update_keys, weight_keys


def _weight_of(module: str, config: PeftConfig, stacks: Iterable[str]) -> str:
    """The name of the weight that a module of PEFT updates.

    PEFT wraps a module once for each target parameter in it, and the last one is outermost.
    """
    targets = config.target_parameters or ()
    inside = [
        stack
        for stack in stacks
        if stack.rpartition(".")[0] == module.replace(BASE_LAYER, "")
        and any(ends_with(stack, target) for target in targets)
    ]
    depth = module.count(BASE_LAYER)
    return inside[-1 - depth] if depth < len(inside) else f"{module}.weight"


def _wrapped(weight: str, updates: Iterable[str]) -> str:
    """The name of PEFT's module for a weight: the inverse of `_weight_of`."""
    module, _, parameter = weight.rpartition(".")
    if parameter == "weight":
        return module
    inside = [other for other in updates if other.rpartition(".")[0] == module]
    return module + BASE_LAYER * (len(inside) - 1 - inside.index(weight))


def _to_ours(
    modules: Modules, move: Move, keys: Sequence[str], config: PeftConfig, stored: TensorFolder
) -> dict[str, Update]:
    """Read the update of a weight, or of one per expert, and split it among our layers."""
    transposed, swapped = modules.layout(move)
    name = move.theirs[0]
    if not any(ends_with(name, target) for target in config.target_parameters or ()):
        name = name.removesuffix(".weight")
    rank = matching(config.rank_pattern, name, config.r)
    alpha = matching(config.alpha_pattern, name, config.lora_alpha)
    *stack, rows, columns = modules.stored_shapes(move)[0]
    if transposed and not swapped:
        rows, columns = columns, rows
    n = math.prod(stack)
    all_a = [
        _read(stored, key + A, (n * rank, columns)).view(*stack, rank, columns) for key in keys
    ]
    all_b = [_read(stored, key + B, (rows, rank * n)).view(rows, rank, *stack) for key in keys]
    all_b = [b.permute(2, 0, 1) if stack else b for b in all_b]
    if swapped:
        all_a, all_b = [b.mT for b in all_b], [a.mT for a in all_a]
    a = all_a[0] if len(all_a) == 1 else torch.stack(all_a)
    sizes = [(*modules.shapes[path][:-1], rank) for path in move.ours]
    parts = move.rule.take([b.mT if transposed else b for b in all_b], sizes, move.block)
    magnitudes: Sequence[Tensor | None] = [None] * len(parts)
    if config.use_dora:
        joined = [_read(stored, key + MAGNITUDE, (rows,)) for key in keys]
        magnitudes = move.rule.take(joined, [size[:-1] for size in sizes], move.block)
    return {
        path.removesuffix(".weight"): Update(a, b, magnitude, alpha)
        for path, b, magnitude in zip(move.ours, parts, magnitudes, strict=True)
    }


def _weights_to_ours(
    modules: Modules, move: Move, keys: Sequence[str], stored: TensorFolder
) -> dict[str, Tensor]:
    """Read a weight that is stored in full, and split it among our weights."""
    shapes = modules.stored_shapes(move)
    values = [_read(stored, key, shape) for key, shape in zip(keys, shapes, strict=True)]
    sizes = [modules.shapes[path] for path in move.ours]
    return dict(zip(move.ours, move.rule.take(values, sizes, move.block), strict=True))


def _flat(update: Update) -> tuple[Tensor, Tensor]:
    """A and B as PEFT stores them: for experts, (experts · rank, in) and (out, rank · experts)."""
    a, b = update.a, update.b
    return a.flatten(0, -2), b.movedim(0, -1).flatten(1) if b.ndim > MATRIX else b


def _read(stored: TensorFolder, key: str, shape: Shape) -> Tensor:
    """Read a tensor and check its shape and its values."""
    if key not in stored.shapes:
        raise WorkhorseError(f"tensor {key!r} is missing; save the adapter again")
    if stored.shapes[key] != shape:
        raise WorkhorseError(
            f"tensor {key!r} has shape {stored.shapes[key]}, but this base needs {shape}; "
            f"{OTHER_BASE}"
        )
    value = stored.read(key)
    if not value.is_floating_point():
        raise WorkhorseError(f"tensor {key!r} has {value.dtype} values; save the adapter again")
    check_numbers(key, value, "adapter")
    return value


def _check_unchanged(decoder: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Check that saved weights outside `modules_to_save` are the base's, unless quantised."""
    own = dict(decoder.named_parameters(remove_duplicate=False))
    for path, weight in weights.items():
        if path in own and not torch.equal(weight.to(own[path]), own[path]):
            raise WorkhorseError(f"the adapter was trained with another {path}; {OTHER_BASE}")
