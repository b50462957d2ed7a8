"""`COVERING` covers all options; each config round-trips and has a plain state dict."""

import itertools
from collections import defaultdict
from typing import Any, get_args

import pytest
from hypothesis import given, settings

from tests.nn.grid import CHOICES, COVERING, FACTORS, configs, make, name, random_tokens
from workhorse.config.base import Config
from workhorse.nn import DecoderConfig

every_config = pytest.mark.parametrize("config", COVERING, ids=map(name, range(len(COVERING))))


def config_classes(annotation: Any) -> set[type[Config]]:
    """Every config class that an annotation can hold, at any depth."""
    if not isinstance(annotation, type) or not issubclass(annotation, Config):
        return set().union(*map(config_classes, get_args(annotation)))
    fields = annotation.model_fields.values()
    return {annotation}.union(*(config_classes(field.annotation) for field in fields))


def visit(value: Any, seen: dict[tuple[str, str], set[str]]) -> None:
    """Record the value of every field of every config inside `value`."""
    match value:
        case Config():
            for field in type(value).model_fields:
                inner = getattr(value, field)
                seen[type(value).__name__, field].add(repr(inner))
                visit(inner, seen)
        case dict():
            for inner in value.values():
                visit(inner, seen)
        case _:
            pass


def test_every_field_of_every_config_takes_two_values() -> None:
    seen: dict[tuple[str, str], set[str]] = defaultdict(set)
    for config in COVERING:
        visit(config, seen)
    fields = {
        (kind.__name__, field)
        for kind in config_classes(DecoderConfig)
        for field in kind.model_fields
        if field != "kind"
    }
    assert len(fields) > 90  # the search found the fields
    assert [field for field in sorted(fields) if len(seen[field]) < 2] == []


def test_every_choice_in_a_literal_appears() -> None:
    seen: dict[tuple[str, str], set[str]] = defaultdict(set)
    for config in COVERING:
        visit(config, seen)
    missing = [
        (kind.__name__, field, choice)
        for kind in config_classes(DecoderConfig)
        for field, info in kind.model_fields.items()
        for choice in literal_choices(info.annotation)
        if repr(choice) not in seen[kind.__name__, field]
    ]
    assert missing == []


def literal_choices(annotation: Any) -> tuple[Any, ...]:
    choices = get_args(annotation)
    return choices if choices and all(isinstance(c, str | int) for c in choices) else ()


def test_every_pair_of_kinds_appears() -> None:
    held = [{factor: kind for factor, (kind, _) in choice.items()} for choice in CHOICES]
    for f, g in itertools.combinations(FACTORS, 2):
        pairs = {(row[f], row[g]) for row in held}
        assert pairs == set(itertools.product(FACTORS[f], FACTORS[g])), (f, g)


def test_every_variant_appears() -> None:
    for factor, kinds in FACTORS.items():
        for kind, variants in kinds.items():
            turns = {turn % len(variants) for k, turn in (c[factor] for c in CHOICES) if k == kind}
            assert turns == set(range(len(variants))), (factor, kind)


@every_config
def test_round_trip_through_yaml_json_and_plain_data(config: DecoderConfig) -> None:
    assert DecoderConfig.from_yaml(config.to_yaml()) == config
    assert DecoderConfig.from_json(config.to_json()) == config
    assert DecoderConfig.from_dict(config.to_dict()) == config
    assert config.replace() == config


@settings(max_examples=50)
@given(configs)
def test_any_combination_round_trips(config: DecoderConfig) -> None:
    assert DecoderConfig.from_yaml(config.to_yaml()) == config
    assert DecoderConfig.from_json(config.to_json()) == config


@every_config
def test_a_state_dict_holds_parameters_only(config: DecoderConfig) -> None:
    """Only weights: no masks, tables of angles or other tensors of the context's length."""
    decoder = config.build(device="meta")
    assert list(decoder.buffers()) == []
    assert set(decoder.state_dict()) == {
        name for name, _ in decoder.named_parameters(remove_duplicate=False)
    }
    longer = config.replace(max_seq_len=1000).build(device="meta")
    grown = {
        key
        for key, tensor in longer.state_dict().items()
        if tensor.shape != decoder.state_dict()[key].shape
    }
    assert grown <= {"embedding.positions.table.weight"}


@every_config
def test_building_on_meta_allocates_nothing_and_has_the_same_parameters(
    config: DecoderConfig,
) -> None:
    real, meta = config.build(), config.build(device="meta")
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert {n: p.shape for n, p in real.named_parameters()} == {
        n: p.shape for n, p in meta.named_parameters()
    }


@every_config
def test_every_parameter_gets_a_gradient(config: DecoderConfig) -> None:
    """If the loss does not depend on a parameter, a part was built but not used."""
    decoder = make(config, "auto")
    tokens = random_tokens(config, 3, 12)
    decoder(tokens).square().sum().backward()
    idle = [
        name
        for name, parameter in decoder.named_parameters()
        if parameter.requires_grad  # a router's selection_bias gets no gradient
        and (parameter.grad is None or not parameter.grad.abs().sum() > 0)
    ]
    # A bias on all keys shifts all scores of a query equally, which the softmax removes.
    invisible = [key for key in idle if key.endswith("k_proj.bias")]
    assert [key for key in idle if key not in invisible] == []
