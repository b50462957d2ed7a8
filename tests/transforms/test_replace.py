"""Modules of a transformed model are visible, have their class's forward, and fire hooks."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.native.machine import OPERATORS
from tests.nn.grid import CAUSAL, COVERING, make, name, random_tokens
from tests.nn.paged import paged
from workhorse.data import Batch
from workhorse.execute.choose import decoding_backend
from workhorse.execute.lower.train import train_natively
from workhorse.execute.native_training.vocabulary import replace_embeddings
from workhorse.execute.training import checkpoint_activations
from workhorse.models.families.llama import llama
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.surgery import as_subclass, mixin_class, replace_modules
from workhorse.train.objectives.next_token import NextToken
from workhorse.transforms.quantization import QuantizedLinear, quantize

SOME = COVERING[:12]
TRANSFORMS: dict[str, Callable[[nn.Module], object]] = {
    "embeddings": replace_embeddings,
    "trained natively": lambda module: train_natively(module, OPERATORS),
    "checkpointed": checkpoint_activations,
}


class Doubled(nn.Linear):
    """Returns twice the result of `nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Other:
    """Holds a class with the same name as another class."""

    class Linear(nn.Linear):
        pass


class Negated(nn.Module):
    """Returns the negated result of the next class."""

    def forward(self, input: Tensor) -> Tensor:
        return -super().forward(input)


def test_what_takes_a_modules_place_holds_what_it_held() -> None:
    heard: list[str] = []
    plain = nn.Linear(3, 2)
    plain.register_forward_hook(lambda *_: heard.append("before"))
    made = as_subclass(plain, Doubled, factor=3)
    made.register_forward_hook(lambda *_: heard.append("after"))
    assert made.weight is plain.weight
    assert made.factor == 3
    x = torch.randn(4, 3)
    assert torch.equal(made(x), 2 * nn.functional.linear(x, plain.weight, plain.bias))
    assert heard == ["before", "after"]


def test_a_module_at_several_places_stays_one() -> None:
    shared = nn.Linear(3, 3)
    root = nn.Sequential(shared, nn.Sequential(shared), nn.ReLU())
    same = replace_modules(root, lambda m: as_subclass(m, Doubled) if type(m) is nn.Linear else m)
    assert same is root
    assert type(root[0]) is Doubled
    assert root[0] is root[1][0]


def test_a_root_is_replaced_too() -> None:
    root = nn.Linear(3, 3)
    assert type(replace_modules(root, lambda module: as_subclass(module, Doubled))) is Doubled


def test_a_combined_class_is_made_once_and_named_after_both() -> None:
    kind = mixin_class("Minus", Negated, nn.Linear)
    assert kind is mixin_class("Minus", Negated, nn.Linear)
    made, x = as_subclass(nn.Linear(3, 2), kind), torch.randn(4, 3)
    assert "MinusLinear" in repr(made)
    assert torch.equal(made(x), -nn.functional.linear(x, made.weight, made.bias))


def test_combined_classes_of_one_name_are_told_apart_by_pickle() -> None:
    kinds = mixin_class("Minus", Negated, nn.Linear), mixin_class("Minus", Negated, Other.Linear)
    assert kinds[0] is not kinds[1]
    for kind in kinds:
        assert pickle.loads(pickle.dumps(kind)) is kind
        assert kind.__qualname__ == kind.__name__


def test_a_module_of_a_combined_class_is_unpickled_in_another_process() -> None:
    made = as_subclass(nn.Linear(3, 2), mixin_class("Minus", Negated, nn.Linear))
    code = """
import pickle, sys
from torch import nn
from tests.transforms.test_replace import Negated, Other
from workhorse.nn.surgery import mixin_class
mixin_class("Minus", Negated, Other.Linear)  # has the name that nn.Linear's had
made = pickle.load(sys.stdin.buffer)
assert type(made) is mixin_class("Minus", Negated, nn.Linear)
sys.stdout.buffer.write(pickle.dumps(made.weight.detach().numpy()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(made), capture_output=True, check=True
    )
    assert (pickle.loads(done.stdout) == made.weight.detach().numpy()).all()


def assert_nothing_set_from_outside(root: nn.Module) -> None:
    for part in root.modules():
        own = {key for key in vars(part) if callable(getattr(type(part), key, None))}
        assert not own, f"{type(part).__name__} has instance methods {own}"


@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("config", SOME, ids=map(name, range(len(SOME))))
def test_no_instance_has_a_method_of_its_own(how: str, config: DecoderConfig) -> None:
    decoder = make(config).eval()
    TRANSFORMS[how](decoder)
    assert_nothing_set_from_outside(decoder)
    assert_nothing_set_from_outside(decoding_backend(make(config)).decoder)


def test_nor_has_one_that_is_quantised_and_compiled() -> None:
    decoder = llama(d_model=64, n_layers=1, n_heads=2, d_ff=64, vocab_size=64).build().eval()
    quantize(decoder, "int8")
    decoder = decoding_backend(decoder, "compiled").decoder
    assert any(isinstance(part, QuantizedLinear) for part in decoder.modules())
    assert_nothing_set_from_outside(decoder)


@pytest.mark.parametrize("config", SOME, ids=map(name, range(len(SOME))))
def test_hooks_on_every_module_fire_in_native_training(config: DecoderConfig) -> None:
    tokens = random_tokens(config, 2, 6)

    def called(module: NextToken) -> set[str]:
        found: set[str] = set()
        for path, part in module.named_modules(remove_duplicate=False):
            part.register_forward_hook(lambda *_, path=path: found.add(path))
        module(Batch(tokens, tokens, None, torch.zeros(2))).loss.backward()
        return found

    plain = NextToken(make(config)).train()
    native = copy.deepcopy(plain)
    train_natively(native, OPERATORS)
    expected = called(plain)
    assert "decoder.head.proj" in expected
    assert called(native) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CAUSAL[:12], ids=lambda one: name(COVERING.index(one)))
@torch.no_grad()
def test_hooks_on_every_module_fire_in_native_decoding(
    config: DecoderConfig, dtype: torch.dtype
) -> None:
    """Hooks fire in the pass over a prompt and in a step of one token, with a paged cache."""
    tokens = random_tokens(config, 2, 6)

    def called(decoder: Decoder) -> list[set[str]]:
        found: set[str] = set()
        for path, part in decoder.named_modules(remove_duplicate=False):
            part.register_forward_hook(lambda *_, path=path: found.add(path))
        view, passes = paged(decoder, 2, 6), list[set[str]]()
        for some in (tokens[:, :5], tokens[:, 5:]):
            decoder(some, cache=view)
            passes.append(set(found))
            found.clear()
        return passes

    plain = make(config).to(dtype)
    native = decoding_backend(plain).decoder
    expected = called(plain)
    assert "head.proj" in expected[1]
    assert called(native) == expected
