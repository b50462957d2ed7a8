"""Weights that change, are replaced, cast or copied after a native step."""

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.execute.native_decoding.stepping import along, built, quick, without_steps
from tests.native.machine import needs
from tests.nn.grid import error
from tests.nn.paged import paged
from workhorse.errors import WorkhorseError
from workhorse.transforms.quantization import FormatName

pytestmark = [needs("steps"), needs("decoding")]


def test_weights_may_change_in_place() -> None:
    decoder, other = quick(built()), built(seed=1)
    tokens = torch.randint(0, 61, (1, 8))
    along(decoder, tokens[:, :3], tokens)
    decoder.load_state_dict(other.state_dict())
    expected = along(other, tokens[:, :3], tokens)
    assert error(along(decoder, tokens[:, :3], tokens), expected) <= 1e-5


@pytest.mark.parametrize(
    "replace",
    [
        lambda decoder, other: decoder.load_state_dict(other.state_dict(), assign=True),
        lambda decoder, other: setattr(
            decoder.embedding.tokens, "weight", other.embedding.tokens.weight
        ),
        lambda decoder, other: setattr(decoder.layers[1], "attention", other.layers[1].attention),
        lambda decoder, other: [
            setattr(mine, "data", its.data.clone())
            for mine, its in zip(decoder.parameters(), other.parameters(), strict=True)
        ],
    ],
    ids=["all weights", "a weight", "a module", "their storage"],
)
def test_what_is_replaced_is_noticed(replace: Callable[[Any, Any], object]) -> None:
    plain, decoder, other = built(), quick(built()), quick(built(seed=1))
    tokens = torch.randint(0, 61, (1, 8))
    before = along(decoder, tokens[:, :3], tokens)
    replace(decoder, other)
    replace(plain, built(seed=1))
    after = along(decoder, tokens[:, :3], tokens)
    assert error(after, along(plain, tokens[:, :3], tokens)) <= 1e-5
    assert error(after, before) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_decoder_may_be_cast_after_its_first_step(dtype: torch.dtype) -> None:
    decoder = quick(built())
    tokens = torch.randint(0, 61, (1, 8))
    first = along(decoder, tokens[:, :3], tokens)
    cast = along(decoder.to(dtype), tokens[:, :3], tokens)
    assert torch.equal(cast, along(quick(built().to(dtype)), tokens[:, :3], tokens))
    if dtype != torch.bfloat16:  # no operator supports it, so the modules compute
        assert error(cast.to(first.dtype), first) <= 2e-3


@pytest.mark.parametrize("change", ["cast", "load", "load around it"])
def test_parameters_may_be_swapped_after_a_step(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """PyTorch swaps a parameter only if no other object than its module refers to it."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    decoder, expected = quick(built()), quick(built(seed=1))
    tokens = torch.randint(0, 61, (1, 8))
    along(decoder, tokens[:, :3], tokens)
    if change == "cast":
        decoder, expected = decoder.bfloat16(), quick(built().bfloat16())
    else:
        around = decoder if change == "load" else torch.nn.Sequential(decoder)
        other = expected if change == "load" else torch.nn.Sequential(expected)
        around.load_state_dict(other.state_dict())
    assert torch.equal(
        along(decoder, tokens[:, :3], tokens), along(expected, tokens[:, :3], tokens)
    )


@torch.no_grad()
def test_a_decoder_of_which_one_layer_is_cast_is_refused() -> None:
    decoder = quick(built())
    token = torch.tensor([[5]])
    cache = paged(decoder, 1, 8)
    decoder(token, cache=cache)
    decoder.layers[1].to(torch.float64)
    with pytest.raises(WorkhorseError, match=r"a part of the decoder was cast .*; cast all of it"):
        decoder(token, cache=cache)
    decoder.layers[1].to(torch.float32)
    again, other = quick(built()), paged(decoder, 1, 8)
    again(token, cache=other)
    assert torch.equal(decoder(token, cache=cache), again(token, cache=other))


@pytest.mark.parametrize("format", [None, "int8"])
def test_a_bias_that_is_added_is_noticed(format: FormatName | None) -> None:
    decoder, plain = quick(built(), format), without_steps(built(), format)
    tokens = torch.randint(0, 61, (1, 8))
    before = along(decoder, tokens[:, :3], tokens)
    for one in (decoder, plain):
        torch.manual_seed(2)
        v_proj = one.layers[1].attention.v_proj
        v_proj.bias = torch.nn.Parameter(torch.randn(v_proj.out_features))
    after = along(decoder, tokens[:, :3], tokens)
    assert error(after, along(plain, tokens[:, :3], tokens)) <= 1e-5
    assert error(after, before) > 1e-3


def test_weights_may_get_another_order_in_memory() -> None:
    decoder = quick(built())
    tokens = torch.randint(0, 61, (1, 8))
    before = along(decoder, tokens[:, :3], tokens)
    for weight in (decoder.embedding.tokens.weight, decoder.layers[1].attention.v_proj.weight):
        weight.data = weight.data.t().contiguous().t()
    assert error(along(decoder, tokens[:, :3], tokens), before) <= 1e-5


@torch.no_grad()
def test_a_weight_of_another_shape_is_refused() -> None:
    decoder = quick(built())
    token, cache = torch.tensor([[5]]), paged(decoder, 1, 8)
    decoder(token, cache=cache)
    weight = decoder.layers[0].attention.k_proj.weight
    weight.data = weight.data.t().contiguous()
    assert weight.shape[0] != weight.shape[1]
    with pytest.raises(RuntimeError, match="another shape than when the program was made"):
        decoder(token, cache=cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@torch.no_grad()
def test_tokens_are_ids(dtype: torch.dtype) -> None:
    decoder = quick(built())
    with pytest.raises(WorkhorseError, match=f"tokens have dtype {dtype}; give ids"):
        decoder.next_logits(torch.ones(1, 1, dtype=dtype), cache=paged(decoder, 1, 8))


@torch.no_grad()
def test_a_hook_of_a_module_that_was_put_in_is_called() -> None:
    decoder, other = quick(built()), quick(built(seed=1))
    tokens, cache = torch.randint(0, 61, (1, 8)), paged(decoder, 1, 8)
    decoder.next_logits(tokens[:, :1], cache=cache)
    decoder.layers[1].attention = other.layers[1].attention
    called: list[object] = []
    decoder.layers[1].attention.register_forward_hook(lambda *_: called.append(_))
    for n in range(1, 8):
        decoder.next_logits(tokens[:, n : n + 1], cache=cache)
    assert len(called) == 7


@torch.no_grad()
def test_a_weight_without_storage_is_refused() -> None:
    decoder = quick(built())
    token, cache = torch.tensor([[5]]), paged(decoder, 1, 8)
    decoder(token, cache=cache)
    next(decoder.layers[0].parameters()).untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the storage of a weight was freed"):
        decoder(token, cache=cache)


def test_a_pickled_decoder_steps_in_another_process(tmp_path: Path) -> None:
    decoder, tokens = quick(built()), torch.randint(0, 61, (1, 8))
    here = along(decoder, tokens[:, :3], tokens)
    (tmp_path / "pickled").write_bytes(pickle.dumps((decoder, tokens)))
    code = """
import pickle, sys, torch
from tests.execute.native_decoding.stepping import along
decoder, tokens = pickle.load(open(sys.argv[1], "rb"))
torch.save(along(decoder, tokens[:, :3], tokens), sys.argv[2])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "pickled"), str(tmp_path / "there")]
    subprocess.run(command, check=True)
    assert torch.equal(torch.load(tmp_path / "there"), here)


def test_a_copy_outlives_what_it_was_copied_from() -> None:
    decoder, tokens = quick(built()), torch.randint(0, 61, (1, 8))
    expected = along(decoder, tokens[:, :3], tokens)
    assert decoder.translated is not None
    assert decoder.translated.kept is not None
    gone = decoder.translated.kept.weights.number
    copied = copy.deepcopy(decoder)
    del decoder
    gc.collect()
    assert torch.equal(along(copied, tokens[:, :3], tokens), expected)
    assert copied.translated is not None
    assert copied.translated.kept is not None
    copied.translated.kept.weights.number = gone
    with pytest.raises(RuntimeError, match=f"no weights are registered with id {gone}"):
        along(copied, tokens[:, :3], tokens)
