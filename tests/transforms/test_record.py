"""A model knows which transforms it carries, and refuses those that cannot follow them."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.native.machine import DECODING, OPERATORS, needs
from tests.nn.grid import CAUSAL
from workhorse.checkpoints import weights_of
from workhorse.errors import WorkhorseError
from workhorse.execute.checkpointing import checkpoint_activations
from workhorse.execute.compiled.compiled_layers import compile_layers
from workhorse.execute.compiled.compiled_step import compile_steps
from workhorse.execute.inference import prepare_for_inference
from workhorse.execute.native_decoding.attention import attend_natively
from workhorse.execute.native_decoding.native_step import step_natively
from workhorse.execute.native_decoding.stream import stream_weights
from workhorse.execute.native_training import train_natively
from workhorse.models.families.llama import llama
from workhorse.native import Operators
from workhorse.nn import Decoder
from workhorse.train.objectives.next_token import NextToken
from workhorse.transforms.grouped_heads import group_heads
from workhorse.transforms.quantization.quantize import quantize
from workhorse.transforms.record import (
    MAY_FOLLOW,
    Transform,
    TransformName,
    check,
    record,
    transforms_of,
)

# PyTorch's compiler imports what PyTorch itself calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")


def make() -> Decoder:
    return llama(d_model=64, n_layers=1, n_heads=2, d_ff=64, vocab_size=64).build("sdpa").eval()


def train(root: nn.Module) -> None:
    train_natively(root, Operators())


APPLY: dict[str, Callable[[Decoder], object]] = {
    "group_heads": lambda decoder: group_heads(decoder, 1),
    "quantize": lambda decoder: quantize(decoder, "int8"),
    "stream_weights": lambda decoder: stream_weights(decoder, Operators()),
    "attend_natively": lambda decoder: attend_natively(decoder, DECODING),
    "step_natively": lambda decoder: step_natively(decoder, Operators()),
    "compile_steps": compile_steps,
    "train_natively": train,
    "checkpoint_activations": checkpoint_activations,
    "compile_layers": compile_layers,
}


def names(root: nn.Module) -> list[str]:
    return [transform.name for transform in transforms_of(root)]


def test_a_plain_model_carries_none() -> None:
    assert transforms_of(make()) == ()
    assert transforms_of(nn.Linear(2, 2)) == ()


@needs("decoding")
def test_transforms_of_inference_are_told_in_their_order_with_their_options() -> None:
    decoder = prepare_for_inference(quantize(make(), "int4"), compile=True)
    assert transforms_of(decoder) == (
        Transform("quantize", {"format": "int4"}),
        Transform("stream_weights", {"operators": replace(OPERATORS, training=None)}),
        Transform("attend_natively"),
        Transform("compile_steps"),
        *([Transform("step_natively")] if OPERATORS.steps else []),
    )


def test_the_record_stays_with_the_decoder_in_a_wrapper_and_in_a_copy() -> None:
    decoder = make()
    module = NextToken(decoder)
    train(module)
    checkpoint_activations(decoder)
    compile_layers(decoder)
    expected = ["train_natively", "checkpoint_activations", "compile_layers"]
    assert names(decoder) == names(module) == names(copy.deepcopy(module)) == expected


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
            f"the model carries {name} already; apply it once"
            if carried == name
            else f"{name} cannot follow {carried}; "
        )
        with pytest.raises(WorkhorseError, match=expected):
            APPLY[name](decoder)
        assert repr(decoder) == before
        assert names(decoder) == [carried]


@pytest.mark.parametrize(
    ("carried", "name"),
    [
        ("train_natively", "train_natively"),
        ("quantize", "train_natively"),
        ("compile_steps", "train_natively"),
        ("checkpoint_activations", "train_natively"),
        ("compile_layers", "checkpoint_activations"),
        ("compile_steps", "quantize"),
        ("train_natively", "quantize"),
        ("compile_steps", "stream_weights"),
        ("quantize", "group_heads"),
        ("train_natively", "compile_steps"),
    ],
)
def test_orders_that_cannot_be(carried: TransformName, name: TransformName) -> None:
    decoder = make()
    record(decoder, carried)
    with pytest.raises(WorkhorseError, match=name):
        check(decoder, name)


def test_the_remedy_is_the_other_order_where_that_can_be() -> None:
    decoder = make()
    record(decoder, "compile_steps")
    with pytest.raises(
        WorkhorseError, match=r"quantize cannot follow compile_steps; apply quantize"
    ):
        quantize(decoder, "int8")
    with pytest.raises(
        WorkhorseError, match=r"train_natively cannot follow .*; load the model anew"
    ):
        train(NextToken(decoder))


def test_weights_that_were_replaced_cannot_be_written() -> None:
    with pytest.raises(WorkhorseError, match="quantised to int8, which cannot be written; load"):
        weights_of(quantize(make(), "int8"))
    decoder = make()
    expected = {name: weight.clone() for name, weight in weights_of(decoder).items()}
    train(decoder)
    checkpoint_activations(decoder)
    found = weights_of(decoder)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
