"""A model records its transforms, and rejects transforms that cannot follow them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.nn.grid import CAUSAL
from workhorse.checkpoints import weights_of
from workhorse.errors import WorkhorseError
from workhorse.execute.body import body_of
from workhorse.execute.lower.train import train_natively
from workhorse.execute.training import checkpoint_activations
from workhorse.models.families.llama import llama
from workhorse.native import Operators
from workhorse.nn import Decoder
from workhorse.train.objectives.next_token import NextToken
from workhorse.transforms.grouped_heads import group_heads
from workhorse.transforms.quantization import quantize
from workhorse.transforms.record import MAY_FOLLOW, Transform, record, transforms_of


def make() -> Decoder:
    return llama(d_model=64, n_layers=1, n_heads=2, d_ff=64, vocab_size=64).build("sdpa").eval()


APPLY: dict[str, Callable[[Decoder], object]] = {
    "group_heads": lambda decoder: group_heads(decoder, 1),
    "quantize": lambda decoder: quantize(decoder, "int8"),
}


def names(root: nn.Module) -> list[str]:
    return [transform.name for transform in transforms_of(root)]


def test_a_plain_model_carries_none() -> None:
    assert transforms_of(make()) == ()
    assert transforms_of(nn.Linear(2, 2)) == ()


def test_the_record_stays_with_the_decoder_in_a_wrapper_a_copy_and_a_body() -> None:
    decoder = quantize(make(), "int4")
    module = NextToken(decoder)
    train_natively(module, Operators())
    checkpoint_activations(decoder)
    carried = (Transform("quantize", {"format": "int4"}),)
    for root in (decoder, module, copy.deepcopy(module), body_of(decoder)):
        assert transforms_of(root) == carried


def test_what_is_made_of_a_model_carries_what_that_one_carried() -> None:
    once = group_heads(CAUSAL[0].replace(blocks=make().config.blocks).build(), 2)
    twice = group_heads(once, 1)
    assert transforms_of(once) == (Transform("group_heads", {"n_kv_heads": 2}),)
    assert transforms_of(twice)[1:] == (Transform("group_heads", {"n_kv_heads": 1}),)


@pytest.mark.parametrize("name", APPLY)
def test_what_cannot_follow_is_refused_before_anything_is_changed(name: str) -> None:
    for carried in MAY_FOLLOW:
        if carried in MAY_FOLLOW[name]:
            continue
        decoder = make()
        record(decoder, carried, format="int8")
        before = repr(decoder)
        expected = (
            f"{name} was already applied to the model; load"
            if carried == name
            else f"{name} cannot be applied after {carried}; apply {name} first"
        )
        with pytest.raises(WorkhorseError, match=expected):
            APPLY[name](decoder)
        assert repr(decoder) == before
        assert names(decoder) == [carried]


@pytest.mark.parametrize("name", APPLY)
def test_a_body_is_not_changed(name: str) -> None:
    body = body_of(make())
    before = repr(body)
    with pytest.raises(WorkhorseError, match=f"{name} cannot change .* apply it to the reference"):
        APPLY[name](body)
    assert repr(body) == before


def test_weights_that_were_replaced_cannot_be_written() -> None:
    with pytest.raises(WorkhorseError, match="quantised to int8, which cannot be written; load"):
        weights_of(quantize(make(), "int8"))
    decoder = make()
    expected = {name: weight.clone() for name, weight in weights_of(decoder).items()}
    train_natively(NextToken(decoder), Operators())
    checkpoint_activations(decoder)
    found = weights_of(decoder)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
