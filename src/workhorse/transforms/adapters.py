"""Adding adapters to a decoder, switching them off, and merging them into its weights."""

import hashlib
import re
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from workhorse.errors import WorkhorseError, nearest, shown
from workhorse.nn import Decoder
from workhorse.nn.attention.kernels import KernelName
from workhorse.nn.experts.router import ALWAYS_FLOAT32
from workhorse.nn.init import undrawn
from workhorse.nn.surgery import as_subclass
from workhorse.transforms.lora import ADAPTED, Adapted, LoraConfig, ends_with, merged_weight
from workhorse.transforms.quantization import QuantizedWeight
from workhorse.transforms.record import check, record, shares_weights, transforms_of


@torch.no_grad()
def add_adapter(
    decoder: Decoder,
    config: LoraConfig,
    *,
    name: str = "default",
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Decoder:
    """Add an adapter to a decoder, in place, and make it the active and only trainable one.

    All other parameters are frozen, except modules in `also_train`. If the decoder shares its
    weights with others, it gets its own copies of these modules.

    Args:
        decoder: the decoder, which may be quantised and may have adapters with other names. On the
            meta device no values are set.
        config: the options of the adapter.
        name: the name of the adapter, an identifier.
        seed: seed of the initial values, which depend on it and on the names of layers only.
        dtype: dtype of the adapter's weights; None for that of the decoder's embedding.

    Returns:
        The decoder.

    Raises:
        WorkhorseError: a name in `targets` or `also_train` does not fit the decoder, the adapter
            exists already, or the decoder carries a transform that an adapter cannot follow.
    """
    check(decoder, "adapt")
    _check_name(decoder, name, config)
    targets = _targets(decoder, config)
    for option in ("ranks", "alphas"):
        for layer_name in getattr(config, option):
            if not any(ends_with(path, layer_name) for path in targets):
                raise WorkhorseError(
                    f"{option}: no layer in targets is called {layer_name}; remove it"
                )
    for path in _parameters_in_full(decoder, config):
        if (layer := path.rpartition(".")[0]) in targets:
            raise WorkhorseError(f"{layer} is in targets and in also_train; remove one")
    if shares_weights(decoder):
        _copy_weights(decoder, set(_parameters_in_full(decoder, config).values()))
    freeze(decoder, config)
    for path, layer in targets.items():
        if not isinstance(layer, Adapted):
            kind = ADAPTED[type(layer)]
            layer = as_subclass(layer, kind, adapters=nn.ModuleDict(), active=None)  # noqa: PLW2901
            decoder.set_submodule(path, layer)
        with undrawn(dtype or decoder.embedding.tokens.weight.dtype), torch.device(decoder.device):
            adapter = config.of(path).build(layer.weight_shape, in_float32=layer.in_float32)
            layer.adapters[name] = adapter
        if decoder.device.type != "meta":
            digest = hashlib.sha256(f"{seed} {path}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
            adapter.reset(layer, generator)
        adapter.train(decoder.training)
    record(decoder, "adapt", adapter=name, **config.to_dict())
    set_adapter(decoder, name)
    return decoder


def freeze(decoder: Decoder, config: LoraConfig) -> None:
    """Freeze all parameters of a decoder, in place, except those of the modules in `also_train`.

    Raises:
        WorkhorseError: a name fits no module, or fits a module that has no weights to train.
    """
    trained = _parameters_in_full(decoder, config)
    decoder.requires_grad_(False)
    for parameter in trained.values():
        parameter.requires_grad_()


def adapters_of(decoder: nn.Module) -> dict[str, LoraConfig]:
    """The options of a decoder's adapters, by name."""
    every = [dict(one.options) for one in transforms_of(decoder) if one.name == "adapt"]
    return {options.pop("adapter"): LoraConfig.from_dict(options) for options in every}


def adapter_parameters(decoder: Decoder, name: str = "default") -> dict[str, nn.Parameter]:
    """The parameters of an adapter by name, including those of modules in `also_train`.

    Raises:
        WorkhorseError: the decoder has no adapter of this name.
    """
    updates = {
        path: parameter
        for path, parameter in decoder.named_parameters()
        if f".adapters.{name}." in path
    }
    return updates | _parameters_in_full(decoder, _config_of(decoder, name))


def trained_parameters(decoder: Decoder) -> int:
    """The number of trained parameters of a decoder with an adapter called `default`."""
    return sum(parameter.numel() for parameter in adapter_parameters(decoder).values())


def set_adapter(decoder: Decoder, name: str) -> None:
    """Make one adapter the active one. It does not change which parameters are trained.

    Raises:
        WorkhorseError: the decoder has no adapter of this name.
    """
    _config_of(decoder, name)  # raises an error if there is no such adapter
    for layer in adapted_layers(decoder).values():
        layer.active = name if name in layer.adapters else None


@contextmanager
def disabled(root: nn.Module) -> Generator[None]:
    """Context in which a model computes without adapters, as its base.

    Args:
        root: the decoder that is executed, or a module that contains it. The switch belongs to the
            modules: a body (`workhorse.execute`) has other modules than its reference.

    Raises:
        WorkhorseError: the adapter trains weights of the base (`also_train`), whose values before
            the training are not in memory.
    """
    for name, config in adapters_of(root).items():
        if config.also_train:
            raise WorkhorseError(
                f"adapter {name} changes {', '.join(config.also_train)} of its base (also_train) "
                "and cannot be switched off; load the base as a second model"
            )
    layers = adapted_layers(root).values()
    active = [layer.active for layer in layers]
    for layer in layers:
        layer.active = None
    try:
        yield
    finally:
        for layer, name in zip(layers, active, strict=True):
            layer.active = name


def why_not_merged(decoder: Decoder) -> str | None:
    """The reason why `merge_adapter` cannot merge the active adapter, or None if it can."""
    if any(one.name == "quantize" for one in transforms_of(decoder)):
        return (
            "the base of the adapter is quantised, so a merged weight would be quantised again; "
            "load the base without quantize, and this adapter with adapter (--adapter)"
        )
    return None


@torch.no_grad()
def merge_adapter(decoder: Decoder, kernel: KernelName = "auto") -> Decoder:
    """Return a decoder without adapters, with the active adapter's updates added to its weights.

    Sums are computed in float32 and rounded to the dtype of the weights. All other weights are
    shared with `decoder`. If the adapter changes a head that shares its weight with the embedding,
    the returned decoder has a separate head.

    Args:
        decoder: the decoder with the adapter.
        kernel: the implementation of attention in the returned decoder.

    Raises:
        WorkhorseError: the base is quantised.
    """
    if why := why_not_merged(decoder):
        raise WorkhorseError(why)
    weights = {path: weight.detach() for path, weight in decoder.named_parameters()}
    config = decoder.config
    for path, layer in adapted_layers(decoder).items():
        if layer.active is not None:
            weights[f"{path}.weight"] = merged_weight(layer)
            if layer.dense_weight is decoder.embedding.tokens.weight:
                config = config.replace(head=config.head.replace(tied=False))
    merged = config.build(kernel, device="meta")
    of_base = {path: weights[path] for path, _ in merged.named_parameters()}
    merged.load_state_dict(of_base, strict=False, assign=True)
    merged.tie_weights()
    for transform in transforms_of(decoder):
        if transform.name != "adapt":
            record(merged, transform.name, **transform.options)
    return merged.train(decoder.training)


def adapted_layers(root: nn.Module) -> dict[str, Adapted]:
    """The layers that have adapters, by name."""
    return {path: layer for path, layer in root.named_modules() if isinstance(layer, Adapted)}


def _targets(decoder: Decoder, config: LoraConfig) -> dict[str, nn.Module]:
    """The layers that get an update, by name."""
    known = ADAPTED | {kind: kind for kind in ADAPTED.values()}
    if config.targets == "all":
        return {
            f"layers.{path}": module
            for path, module in decoder.layers.named_modules()
            if (kind := known.get(type(module))) and not kind.in_float32 and _is_base(path)
        }
    targets: dict[str, nn.Module] = {}
    for name in config.targets:
        targets |= _named(decoder, name, "targets")
    for path, module in targets.items():
        if type(module) not in known:
            raise WorkhorseError(
                f"targets: {path} is not a linear layer that can have an adapter, but "
                f"{type(module).__name__}; use also_train to train its weights"
            )
    return targets


def _is_base(path: str) -> bool:
    """True if a module does not belong to an adapter."""
    return ".adapters" not in path


def _parameters_in_full(decoder: Decoder, config: LoraConfig) -> dict[str, nn.Parameter]:
    """The parameters of the modules in `also_train`, by name; a tied matrix has the embedding's."""
    trained: set[nn.Parameter] = set()
    for name in config.also_train:
        for path, module in _named(decoder, name, "also_train").items():
            if any(isinstance(part, QuantizedWeight) for part in module.modules()):
                raise WorkhorseError(
                    f"also_train: {path} is quantised and cannot be trained; remove it"
                )
            weights = {
                parameter
                for key, parameter in module.named_parameters()
                if not key.endswith(ALWAYS_FLOAT32)
            }
            if not weights:
                raise WorkhorseError(f"also_train: {path} has no weights to train; remove it")
            trained |= weights
    parameters = decoder.named_parameters()
    return {path: parameter for path, parameter in parameters if parameter in trained}


def _copy_weights(decoder: Decoder, shared: set[nn.Parameter]) -> None:
    """Replace some parameters of a decoder by copies, in place; tied ones stay tied."""
    own = {parameter: nn.Parameter(parameter.detach().clone()) for parameter in shared}
    for module in decoder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in own:
                setattr(module, name, own[parameter])


def _named(decoder: Decoder, name: str, option: str) -> dict[str, nn.Module]:
    """The modules of the base whose path ends with a name, by path."""
    modules: dict[str, nn.Module] = dict(decoder.named_modules())
    modules = {path: module for path, module in modules.items() if _is_base(path)}
    found = {path: module for path, module in modules.items() if ends_with(path, name)}
    if not found:
        ends = {path.rpartition(".")[2] for path in modules} - {""}
        known = {end for end in ends if not end.isdecimal()}
        raise WorkhorseError(f"{option}: no module is called {name}; {nearest(name, known)}")
    return found


def _check_name(decoder: Decoder, name: str, config: LoraConfig) -> None:
    """Check that an adapter of this name can be added to the adapters of a decoder."""
    if not re.fullmatch(r"[A-Za-z]\w*", name) or hasattr(nn.ModuleDict, name):
        raise WorkhorseError(
            f"{shown(name)} cannot be the name of an adapter; use letters, digits and '_'"
        )
    others = adapters_of(decoder)
    if name in others:
        raise WorkhorseError(f"the model already has an adapter {name}; choose another name")
    if others and any(one.also_train for one in (config, *others.values())):
        raise WorkhorseError(
            "an adapter with also_train changes its base and cannot share it with another "
            "adapter; remove also_train"
        )


def _config_of(decoder: nn.Module, name: str) -> LoraConfig:
    configs = adapters_of(decoder)
    if name not in configs:
        raise WorkhorseError(f"the model has no adapter {shown(name)}; {nearest(name, configs)}")
    return configs[name]
