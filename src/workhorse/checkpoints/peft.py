"""Adapters in the format of PEFT 0.21: `adapter_config.json` and `adapter_model.safetensors`.

PEFT names tensors after the modules of the transformers model. The rules of the model family say
which rows of our matrices are rows of theirs, and each row of B belongs to the same row of W:

    W of theirs = rows of (W_1, W_2, …)   so   B of theirs = the same rows of (B_1, B_2, …)

If their matrix holds several of ours, such as q, k and v, one A serves all. Ours are written this
way if their A's are equal. Otherwise the A's are stacked, and each B is zero in the columns of the
other A's. This computes the same, with the sum of the ranks.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from workhorse.checkpoints.huggingface.load import ADAPTER_FILE
from workhorse.checkpoints.huggingface.tensor_folder import TensorFolder
from workhorse.checkpoints.model_folder import make_folder
from workhorse.checkpoints.runs.manifest import Disk
from workhorse.checkpoints.tensors import check_numbers
from workhorse.config.base import Config, ConfigError
from workhorse.devices.transfer import copy_tensors
from workhorse.errors import WorkhorseError, shown
from workhorse.files.safetensors import fill, lay_out, whole
from workhorse.files.text_formats import read_json
from workhorse.models.huggingface import Family
from workhorse.models.huggingface.modules import TRANSPOSED_STACKS, module_rules
from workhorse.models.huggingface.moves import Move, Shape, plan
from workhorse.nn import Decoder
from workhorse.transforms.adapters import (
    adapted_layers,
    adapter_parameters,
    adapters_of,
    add_adapter,
)
from workhorse.transforms.lora import Adapted, Dora, LoraConfig, LowRank, ends_with

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX, INNER = "base_model.model.", ".base_layer"
A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
OWN_WEIGHT = ".base_layer.weight"
HEAD = "lm_head"
"""Target whose frozen weight PEFT also saves."""
EMBEDDING, HEAD_WEIGHT = "embedding.tokens.weight", "head.proj.weight"
OTHER = "give the base that the adapter was trained on"
Value = TypeVar("Value")


class PeftConfig(Config):
    """`adapter_config.json` of a LoRA, with every key that PEFT 0.21.2 writes.

    The tensors show which layers have an adapter, so keys that select layers are not evaluated. An
    option that only allows null or false is not supported.
    """

    alora_invocation_tokens: None = None
    alpha_pattern: dict[str, int | float] = Field(default={})
    arrow_config: None = None
    auto_mapping: Any = None
    base_model_name_or_path: str | None = None
    bias: Literal["none"] = "none"
    corda_config: None = None
    ensure_weight_tying: bool = False
    eva_config: Any = None
    exclude_modules: Any = None
    fan_in_fan_out: bool = False
    inference_mode: bool = True
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal"] = True
    kasa_config: None = None
    layer_replication: None = None
    layers_pattern: Any = None
    layers_to_transform: Any = None
    loftq_config: Any = Field(default={})
    lora_alpha: int | float = Field(default=8, gt=0)
    lora_bias: bool = False
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    lora_ga_config: None = None
    megatron_config: None = None
    megatron_core: Any = "megatron.core"
    modules_to_save: list[str] | None = None
    monteclora_config: None = None
    peft_type: Literal["LORA"]
    peft_version: str = "0.21.2"
    qalora_group_size: Any = 16
    r: int = Field(default=8, gt=0)
    rank_pattern: dict[str, int] = Field(default={})
    revision: Any = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    task_type: Literal["CAUSAL_LM"] | None = None
    trainable_token_indices: None = None
    use_bdlora: None = None
    use_dora: bool = False
    use_qalora: bool = False
    use_rslora: bool = False
    velora_config: None = None

    def model_post_init(self, _context: object) -> None:
        for option in ("lora_bias", "use_qalora"):
            if getattr(self, option):
                raise ConfigError("true is not supported; train the adapter without it", option)


class Update(NamedTuple):
    """The update `scale · B A` of a matrix, or of each matrix of a stack."""

    a: Tensor
    """(…, rank, in_features)."""
    b: Tensor
    """(…, out_features, rank)."""
    magnitude: Tensor | None
    """DoRA's magnitudes, (…, out_features)."""
    alpha: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


class Names:
    """The weights of a base as a transformers model has them in memory.

    Args:
        decoder: the base, with or without adapters.
        family: its model type.
        stored: names of their tensors that exist; None for the usual names.
    """

    def __init__(
        self, decoder: Decoder, family: Family, stored: Iterable[str] | None = None
    ) -> None:
        base = decoder.config.build(device="meta").named_parameters(remove_duplicate=False)
        self.family = family
        self.shapes: dict[str, Shape] = {name: tuple(weight.shape) for name, weight in base}
        self.moves = plan(module_rules(family), self.shapes, decoder.config, stored)
        self.modules = _modules(name for move in self.moves for name in move.theirs)
        self.ours = _modules(self.shapes)
        self.parameters = [
            name
            for move in self.moves
            for name in move.theirs
            if not name.endswith((".weight", "bias"))
        ]

    def layout(self, move: Move) -> tuple[bool, bool]:
        """How a matrix of theirs is stored: True if transposed; True if PEFT takes A for B.

        Raises:
            WorkhorseError: the rows of their matrix are not rows of ours.
        """
        sizes = [(*self.shapes[name][:-1], 2) for name in move.ours]
        counts = [math.prod(size[:-1]) for size in sizes]
        rows = torch.arange(sum(counts))
        parts = torch.stack([rows, -1 - rows], -1).split(counts)
        probes = [part.view(size) for part, size in zip(parts, sizes, strict=True)]
        found = move.rule.put(probes, sizes, move.block)
        n_dims = len(sizes[0]) - (len(found) > 1)
        for turned in (False, True):
            given = [one.mT if turned else one for one in found if one.ndim == n_dims]
            if given and all(
                len(one.unbind(-1)) == 2 and torch.equal(one[..., 1], -1 - one[..., 0])  # noqa: PLR2004
                for one in given
            ):
                stack = turned and n_dims > 2  # noqa: PLR2004
                return turned, stack and self.family.model_type not in TRANSPOSED_STACKS
        raise WorkhorseError(
            f"PEFT has no adapter for {move.theirs[0]} of {self.family.model_type}, which holds "
            f"{move.ours[0]}; train the adapter without this target"
        )

    def to_theirs(
        self, move: Move, updates: Sequence[Update | None], unit: Callable[[int], float]
    ) -> Update:
        """Join the updates of our weights to the update of the weight that contains them.

        `unit` is the divisor of alpha for a rank.
        """
        turned, swapped = self.layout(move)
        given = [one for one in updates if one is not None]
        first = given[0]
        shared = all(torch.equal(one.a, first.a) for one in given)
        a = first.a if shared else torch.cat([one.a for one in given], -2)
        parts: list[Tensor] = []
        at = 0
        for name, one in zip(move.ours, updates, strict=True):
            parts.append(first.b.new_zeros(*self.shapes[name][:-1], a.shape[-2]))
            if one is not None:
                scale = (one.alpha / unit(one.rank)) / (first.alpha / unit(first.rank))
                parts[-1][..., at : at + one.rank] = one.b * scale
                at += 0 if shared else one.rank
        (b,) = move.rule.put(parts, [tuple(part.shape) for part in parts], move.block)
        b, magnitude = b.mT if turned else b, None
        if first.magnitude is not None:
            lengths = [one.magnitude for one in given if one.magnitude is not None]
            if len(lengths) < len(move.ours) or lengths[0].ndim > 1:
                raise WorkhorseError(
                    f"PEFT has no DoRA for a part of {move.theirs[0]} or for experts; "
                    "train the adapter with dora=false"
                )
            sizes = [tuple(one.shape) for one in lengths]
            (magnitude,) = move.rule.put(lengths, sizes, move.block)
        alpha = first.alpha * (unit(a.shape[-2]) / unit(first.rank))
        return Update(b.mT, a.mT, None, alpha) if swapped else Update(a, b, magnitude, alpha)

    def to_ours(self, move: Move, updates: Sequence[Update]) -> dict[str, Update]:
        """Split the update of their weight, or of one weight per expert, among our weights."""
        turned, swapped = self.layout(move)
        pairs = [(one.b.mT, one.a.mT) if swapped else (one.a, one.b) for one in updates]
        a = pairs[0][0] if len(pairs) == 1 else torch.stack([pair[0] for pair in pairs])
        sizes = [(*self.shapes[name][:-1], a.shape[-2]) for name in move.ours]
        stored = [b.mT if turned else b for _, b in pairs]
        parts = move.rule.take(stored, sizes, move.block)
        lengths = [one.magnitude for one in updates if one.magnitude is not None]
        magnitudes = (
            move.rule.take(lengths, [size[:-1] for size in sizes], move.block)
            if lengths
            else [None] * len(parts)
        )
        return {
            name.removesuffix(".weight"): Update(a, b, magnitude, updates[0].alpha)
            for name, b, magnitude in zip(move.ours, parts, magnitudes, strict=True)
        }

    def stored_shapes(self, move: Move) -> list[Shape]:
        """The shapes of their weights."""
        sizes = [self.shapes[name] for name in move.ours]
        empty = [torch.empty(size, device="meta") for size in sizes]
        return [tuple(one.shape) for one in move.rule.put(empty, sizes, move.block)]

    def seen_by_peft(self, move: Move) -> Shape:
        """The shape of one of their weights, (…, out_features, in_features), as PEFT reads it."""
        turned, swapped = self.layout(move)
        *stack, rows, columns = self.stored_shapes(move)[0]
        return (*stack, columns, rows) if turned and not swapped else (*stack, rows, columns)


def write_peft(
    folder: Path, decoder: Decoder, family: Family, base: str, *, name: str = "default"
) -> int:
    """Write an adapter as a PEFT directory, completely or not at all.

    Args:
        folder: a new or empty folder.
        decoder: the decoder with the adapter.
        family: the model type of the base.
        base: path or hub id of the base, as PEFT will load it.
        name: the name of the adapter.

    Returns:
        The number of elements of the written tensors.

    Raises:
        WorkhorseError: PEFT cannot express the adapter, or a value is infinite or NaN.
    """
    config, names = adapters_of(decoder)[name], Names(decoder, family)
    layers = {f"{path}.weight": one for path, one in adapted_layers(decoder).items()}
    ours = {
        path: _update(path.removesuffix(".weight"), one, config, name)
        for path, one in layers.items()
        if name in one.adapters
    }
    updates: dict[str, Update] = {}
    fan_in = False  # that of the last layer, as PEFT sets it layer by layer
    for move in names.moves:
        if not ours.keys().isdisjoint(move.ours):
            parts = [ours.get(one) for one in move.ours]
            updates[move.theirs[0]] = names.to_theirs(move, parts, config.divisor)
            fan_in = names.layout(move)[0] if move.theirs[0].endswith(".weight") else fan_in
    tensors, options = _trained_in_full(decoder, names, name)
    for theirs, update in updates.items():
        key = _nested(theirs, updates)
        tensors[key + A], tensors[key + B] = _flat(update)
        if update.magnitude is not None:
            tensors[key + MAGNITUDE] = update.magnitude
        if theirs == f"{HEAD}.weight":
            tensors[key + OWN_WEIGHT] = decoder.head.proj.weight.detach()
    for key, value in tensors.items():
        check_numbers(key, value)
    modules = [one.removesuffix(".weight") for one in updates if one.endswith(".weight")]
    parameters = [one for one in updates if not one.endswith(".weight")]
    every = [*names.modules, *parameters]
    values = {one.removesuffix(".weight"): update for one, update in updates.items()}
    alphas = {one: _plain(update.alpha) for one, update in values.items()}
    written = PeftConfig(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=config.rank,
        lora_alpha=_plain(config.alpha),
        lora_dropout=config.dropout,
        use_dora=config.dora,
        use_rslora=config.scaling == "sqrt_rank",
        rank_pattern=_pattern({one: values[one].rank for one in values}, config.rank, every),
        alpha_pattern=_pattern(alphas, _plain(config.alpha), every),
        fan_in_fan_out=fan_in,
        target_modules=sorted(_shortest(modules, every)),
        target_parameters=_shortest(parameters, every) or None,
        **options,
    )

    def write(temporary: Path) -> None:
        data = json.dumps(written.to_dict(), indent=2, sort_keys=True)
        Disk().write_text(temporary / ADAPTER_FILE, data)
        slices = whole({PREFIX + key: value.contiguous() for key, value in tensors.items()})
        lay_out(temporary / WEIGHTS, slices)
        fill(temporary / WEIGHTS, slices)

    make_folder(folder, write)
    return sum(value.numel() for value in tensors.values())


def _trained_in_full(
    decoder: Decoder, names: Names, name: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights of `also_train` by their names, and the options of PEFT that name them."""
    full = {
        path: one.detach()
        for path, one in adapter_parameters(decoder, name).items()
        if ".adapters." not in path
    }
    tied = decoder.config.head.tied and EMBEDDING in full
    if tied:  # PEFT stores both
        full[HEAD_WEIGHT] = full[EMBEDDING]
    tensors: dict[str, Tensor] = {}
    modules: dict[str, str] = {}
    for move in names.moves:
        if full.keys().isdisjoint(move.ours):
            continue
        if missing := sorted(set(move.ours) - full.keys()):
            raise WorkhorseError(f"{move.theirs[0]} also holds {missing[0]}; add it to also_train")
        values = [full[one] for one in move.ours]
        stored = move.rule.put(values, [names.shapes[one] for one in move.ours], move.block)
        tensors |= dict(zip(move.theirs, stored, strict=True))
        if not (tied and HEAD_WEIGHT in move.ours):
            modules |= {one.rpartition(".")[0]: move.ours[0] for one in move.theirs}
    given = adapters_of(decoder)[name].also_train

    def position(module: str) -> int:
        above = _modules([modules[module]])
        return next(n for n, one in enumerate(given) if any(ends_with(path, one) for path in above))

    ordered = sorted(modules, key=position)
    options = {
        "modules_to_save": _shortest(ordered, names.modules, str.endswith) or None,
        "ensure_weight_tying": tied,
    }
    return tensors, options


def add_peft(decoder: Decoder, folder: Path, family: Family, *, name: str = "default") -> Decoder:
    """Add the adapter in a PEFT directory to a decoder, in place, and make it the active one.

    Args:
        decoder: the base, which may be quantised.
        folder: the directory.
        family: the model type of the base.
        name: the name that the adapter gets.

    Raises:
        WorkhorseError: a file is missing or damaged, the adapter has an option that is not
            supported, or it does not fit the base.
    """
    config = _read_config(folder)
    if not (folder / WEIGHTS).exists():
        if (folder / PICKLE).exists():
            raise WorkhorseError(
                f"{folder} has its weights only as {PICKLE}, a format that can run code when it is "
                "read; if you trust it, save it again with PEFT's save_pretrained"
            )
        raise WorkhorseError(f"{folder} has no {WEIGHTS}; give the folder of a PEFT adapter")
    try:
        _add(decoder, config, TensorFolder(folder, WEIGHTS), family, name)
    except WorkhorseError as error:
        raise WorkhorseError(f"{folder}: {error}") from None
    return decoder


def _read_config(folder: Path) -> PeftConfig:
    path = folder / ADAPTER_FILE
    given = read_json(path)
    unset = (None, False, "", [], {})
    known = {key: one for key, one in given.items() if key in PeftConfig.model_fields}
    other = {key: one for key, one in given.items() if key not in known and one not in unset}
    try:
        return PeftConfig.from_dict(known | other)
    except ConfigError as error:
        raise WorkhorseError(f"{path}: {error}") from None


def _add(
    decoder: Decoder, config: PeftConfig, stored: TensorFolder, family: Family, name: str
) -> None:
    found, full = _by_weight(config, stored, Names(decoder, family))
    names = Names(decoder, family, [*found, *full])
    layers: dict[str, Update] = {}
    trained: dict[str, Tensor] = {}
    for move in names.moves:
        if not found.keys().isdisjoint(move.theirs):
            if missing := sorted(set(move.theirs) - found.keys()):
                raise WorkhorseError(f"there is no adapter for {missing[0]}; save it again")
            shape = names.seen_by_peft(move)
            parts = [_read(one, found.pop(one), shape, config, stored) for one in move.theirs]
            layers |= names.to_ours(move, parts)
        if full.keys() >= set(move.theirs) > set():
            keys = [full.pop(one) for one in move.theirs]
            values = [stored.read(key) for key in keys]
            for key, value, shape in zip(keys, values, names.stored_shapes(move), strict=True):
                _check_shape(key, value, shape)
                check_numbers(key, value)
            sizes = [names.shapes[one] for one in move.ours]
            taken = dict(zip(move.ours, move.rule.take(values, sizes, move.block), strict=True))
            module = move.theirs[0].rpartition(".")[0]
            if any(module.endswith(one) for one in config.modules_to_save or ()):
                trained |= taken
            else:
                _check_unchanged(decoder, taken)
    if left := [*found, *full]:
        raise WorkhorseError(
            f"{left[0]} is not a weight of this {family.model_type} model; {OTHER}"
        )
    _check_tied(decoder, config, trained)
    _copy(decoder, _lora_config(config, layers, trained, names), layers, trained, name)


def _by_weight(
    config: PeftConfig, stored: TensorFolder, names: Names
) -> tuple[dict[str, str], dict[str, str]]:
    """Map names of their weights to the beginnings of LoRA's keys, and to keys of whole weights."""
    found: dict[str, str] = {}
    full: dict[str, str] = {}
    for key in stored.shapes:
        inner = key.removeprefix(PREFIX)
        if inner.endswith(A):
            found[_weight_of(inner.removesuffix(A), config, names)] = key.removesuffix(A)
        elif not inner.endswith((B, MAGNITUDE)):
            full[inner.replace(OWN_WEIGHT, ".weight")] = key
    ends = (A, B, MAGNITUDE) if config.use_dora else (A, B)
    for key in found.values():
        if missing := [key + end for end in ends if key + end not in stored.shapes]:
            raise WorkhorseError(f"tensor {missing[0]!r} is missing; save the adapter again")
    used = {key + end for key in found.values() for end in ends} | {*full.values()}
    if others := sorted(stored.shapes.keys() - used):
        raise WorkhorseError(f"tensor {shown(others[0])} belongs to no A of a LoRA; {OTHER}")
    return found, full


def _weight_of(module: str, config: PeftConfig, names: Names) -> str:
    """The name of the weight that a module of PEFT updates.

    PEFT wraps a module once for each of its target parameters, the last one outermost.
    """
    outer = module
    while outer.endswith(INNER):
        outer = outer.removesuffix(INNER)
    wrapped = [
        one
        for one in names.parameters
        if one.rpartition(".")[0] == outer
        and any(ends_with(one, target) for target in config.target_parameters or ())
    ]
    depth = module.count(INNER)
    return wrapped[-1 - depth] if depth < len(wrapped) else f"{module}.weight"


def _nested(weight: str, updates: Iterable[str]) -> str:
    """The name of PEFT's module for the update of a weight: the inverse of `_weight_of`."""
    if weight.endswith(".weight"):
        return weight.removesuffix(".weight")
    module = weight.rpartition(".")[0]
    siblings = [one for one in updates if one.rpartition(".")[0] == module]
    return module + INNER * (len(siblings) - 1 - siblings.index(weight))


def _read(weight: str, key: str, shape: Shape, config: PeftConfig, stored: TensorFolder) -> Update:
    """Read the update of a weight, which has the shape (…, out_features, in_features) for PEFT."""
    name = weight.removesuffix(".weight")
    rank = _matching(config.rank_pattern, name, config.r)
    alpha = _matching(config.alpha_pattern, name, config.lora_alpha)
    *stack, rows, columns = shape
    n = math.prod(stack)
    parts = {A: (n * rank, columns), B: (rows, rank * n)}
    if config.use_dora:
        parts[MAGNITUDE] = (rows,)
    values = {end: stored.read(key + end) for end in parts}
    for end, value in values.items():
        _check_shape(key + end, value, parts[end])
        check_numbers(key + end, value)
    a = values[A].view(*stack, rank, columns)
    b = values[B].view(rows, rank, *stack)
    return Update(a, b.permute(2, 0, 1) if stack else b, values.get(MAGNITUDE), alpha)


def _flat(update: Update) -> tuple[Tensor, Tensor]:
    """A and B as PEFT stores them: for experts, (experts · rank, in) and (out, rank · experts)."""
    a, b = update.a, update.b
    return a.flatten(0, -2), b if b.ndim == 2 else b.permute(1, 2, 0).flatten(1)  # noqa: PLR2004


def _update(path: str, layer: Adapted, config: LoraConfig, name: str) -> Update:
    adapter = layer.adapters[name]
    assert isinstance(adapter, LowRank)
    magnitude = adapter.magnitude.detach() if isinstance(adapter, Dora) else None
    a, b = adapter.lora_a.weight.detach(), adapter.lora_b.weight.detach()
    return Update(a, b, magnitude, config.of(path).alpha)


def _lora_config(
    config: PeftConfig, layers: Mapping[str, Update], trained: Iterable[str], names: Names
) -> LoraConfig:
    ranks = {path: one.rank for path, one in layers.items()}
    alphas = {path: float(one.alpha) for path, one in layers.items()}
    return LoraConfig(
        rank=config.r,
        alpha=config.lora_alpha,
        ranks=_pattern(ranks, config.r, names.ours),
        alphas=_pattern(alphas, float(config.lora_alpha), names.ours),
        scaling="sqrt_rank" if config.use_rslora else "rank",
        dropout=config.lora_dropout,
        dora=config.use_dora,
        targets=tuple(_shortest(layers, names.ours)),
        also_train=tuple(dict.fromkeys(one.rpartition(".")[0] for one in trained)),
    )


def _copy(
    decoder: Decoder,
    config: LoraConfig,
    layers: Mapping[str, Update],
    trained: Mapping[str, Tensor],
    name: str,
) -> None:
    """Add an adapter and set its values."""
    values = dict(trained)
    add_adapter(decoder, config, name=name)
    for path, update in layers.items():
        own = f"{path}.adapters.{name}"
        values[f"{own}.lora_a.weight"], values[f"{own}.lora_b.weight"] = update.a, update.b
        if update.magnitude is not None:
            values[f"{own}.magnitude"] = update.magnitude
    into = {path: one.detach() for path, one in adapter_parameters(decoder, name).items()}
    copy_tensors(into, values, "adapter")


def _check_shape(key: str, value: Tensor, shape: Shape) -> None:
    if value.shape != shape:
        raise WorkhorseError(
            f"tensor {key!r} has shape {tuple(value.shape)}, but this base needs {shape}; {OTHER}"
        )


def _check_unchanged(decoder: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Check that whole weights outside `modules_to_save` are those of the base."""
    own = dict(decoder.named_parameters(remove_duplicate=False))
    for path, weight in weights.items():
        if not torch.equal(weight.to(own[path]), own[path]):
            raise WorkhorseError(f"the adapter was trained with another {path}; {OTHER}")


def _check_tied(decoder: Decoder, config: PeftConfig, trained: dict[str, Tensor]) -> None:
    """Check that the embedding and a tied head were trained as one weight, and keep one."""
    pair = [trained[one] for one in (EMBEDDING, HEAD_WEIGHT) if one in trained]
    if not (decoder.config.head.tied and pair):
        return
    if not config.ensure_weight_tying or not torch.equal(pair[0], pair[-1]):
        raise WorkhorseError(
            "modules_to_save separates the head from the embedding, which share one weight in this "
            "base; train the adapter with ensure_weight_tying"
        )
    trained[EMBEDDING] = trained.pop(HEAD_WEIGHT, pair[0])


def _modules(parameters: Iterable[str]) -> list[str]:
    """The names of the modules that contain parameters, directly or not."""
    parts = (name.split(".")[:-1] for name in parameters)
    return list(dict.fromkeys(".".join(one[:n]) for one in parts for n in range(1, len(one) + 1)))


def _shortest(
    chosen: Iterable[str], every: Iterable[str], fits: Callable[[str, str], bool] = ends_with
) -> list[str]:
    """The shortest ends of names that fit the chosen names, and no other one of `every`."""
    wanted = dict.fromkeys(chosen)
    others = [one for one in every if one not in wanted]
    found: list[str] = []
    for name in wanted:
        if any(fits(name, one) for one in found):
            continue
        parts = name.split(".")
        ends = (".".join(parts[n:]) for n in reversed(range(len(parts))))
        found.append(next((e for e in ends if not any(fits(o, e) for o in others)), name))
    return found


def _pattern(values: Mapping[str, Value], default: Value, every: Iterable[str]) -> dict[str, Value]:
    """The values that differ from the default, by the shortest ends of names."""
    others = dict.fromkeys(one for one in values.values() if one != default)
    return {
        end: value
        for value in others
        for end in _shortest([name for name, one in values.items() if one == value], every)
    }


def _matching(patterns: Mapping[str, Value], name: str, default: Value) -> Value:
    """The value of the first pattern, a regular expression, that fits the end of a name."""
    try:
        found = (one for end, one in patterns.items() if re.fullmatch(rf"(.*\.)?({end})", name))
        return next(found, default)
    except re.error as error:
        raise WorkhorseError(f"a pattern in {ADAPTER_FILE} is not valid: {error}") from None


def _plain(value: float) -> int | float:
    return int(value) if value == int(value) else value
