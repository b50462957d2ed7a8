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
from tests.execute.passes import last_logits
from tests.native.machine import needs
from tests.nn.grid import error
from tests.nn.paged import paged
from workhorse.errors import WorkhorseError
from workhorse.execute.native_decoding.native_step import NativeStepBackend
from workhorse.native.steps import KeptWeights
from workhorse.transforms.quantization import FormatName

pytestmark = [needs("steps"), needs("decoding")]


def test_weights_may_change_in_place() -> None:
    backend, other = quick(built()), built(seed=1)
    tokens = torch.randint(0, 61, (1, 8))
    along(backend, tokens[:, :3], tokens)
    backend.decoder.load_state_dict(other.state_dict())
    expected = along(other, tokens[:, :3], tokens)
    assert error(along(backend, tokens[:, :3], tokens), expected) <= 1e-5


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
    plain, backend, other = built(), quick(built()), quick(built(seed=1))
    tokens = torch.randint(0, 61, (1, 8))
    before = along(backend, tokens[:, :3], tokens)
    replace(backend.decoder, other.decoder)
    replace(plain, built(seed=1))
    after = along(backend, tokens[:, :3], tokens)
    assert error(after, along(plain, tokens[:, :3], tokens)) <= 1e-5
    assert error(after, before) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_decoder_may_be_cast_after_its_first_step(dtype: torch.dtype) -> None:
    backend = quick(built())
    tokens = torch.randint(0, 61, (1, 8))
    first = along(backend, tokens[:, :3], tokens)
    backend.decoder.to(dtype)
    cast = along(backend, tokens[:, :3], tokens)
    assert torch.equal(cast, along(quick(built().to(dtype)), tokens[:, :3], tokens))
    if dtype != torch.bfloat16:  # no operator supports it, so the modules compute
        assert error(cast.to(first.dtype), first) <= 2e-3


@pytest.mark.parametrize("change", ["cast", "load", "load around it"])
def test_parameters_may_be_swapped_after_a_step(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """PyTorch swaps a parameter only if no other object than its module refers to it."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    backend, expected = quick(built()), quick(built(seed=1))
    decoder, other = backend.decoder, expected.decoder
    tokens = torch.randint(0, 61, (1, 8))
    along(backend, tokens[:, :3], tokens)
    if change == "cast":
        decoder.bfloat16()
        expected = quick(built().bfloat16())
    else:
        around = decoder if change == "load" else torch.nn.Sequential(decoder)
        source = other if change == "load" else torch.nn.Sequential(other)
        around.load_state_dict(source.state_dict())
    assert torch.equal(
        along(backend, tokens[:, :3], tokens), along(expected, tokens[:, :3], tokens)
    )


@torch.no_grad()
def test_a_decoder_of_which_one_layer_is_cast_is_refused() -> None:
    backend = quick(built())
    decoder, token = backend.decoder, torch.tensor([[5]])
    cache = paged(decoder, 1, 8)
    last_logits(backend, token, cache)
    decoder.layers[1].to(torch.float64)
    with pytest.raises(WorkhorseError, match=r"a part of the decoder was cast .*; cast all of it"):
        last_logits(backend, token, cache)
    decoder.layers[1].to(torch.float32)
    again, other = quick(built()), paged(decoder, 1, 8)
    last_logits(again, token, other)
    assert torch.equal(last_logits(backend, token, cache), last_logits(again, token, other))


@pytest.mark.parametrize("format", [None, "int8"])
def test_a_bias_that_is_added_is_noticed(format: FormatName | None) -> None:
    backend, plain = quick(built(), format), without_steps(built(), format)
    tokens = torch.randint(0, 61, (1, 8))
    before = along(backend, tokens[:, :3], tokens)
    for one in (backend.decoder, plain):
        torch.manual_seed(2)
        v_proj = one.layers[1].attention.v_proj
        v_proj.bias = torch.nn.Parameter(torch.randn(v_proj.out_features))
    after = along(backend, tokens[:, :3], tokens)
    assert error(after, along(plain, tokens[:, :3], tokens)) <= 1e-5
    assert error(after, before) > 1e-3


def test_weights_may_get_another_order_in_memory() -> None:
    backend = quick(built())
    decoder, tokens = backend.decoder, torch.randint(0, 61, (1, 8))
    before = along(backend, tokens[:, :3], tokens)
    for weight in (decoder.embedding.tokens.weight, decoder.layers[1].attention.v_proj.weight):
        weight.data = weight.data.t().contiguous().t()
    assert error(along(backend, tokens[:, :3], tokens), before) <= 1e-5


@torch.no_grad()
def test_a_weight_of_another_shape_is_refused() -> None:
    backend = quick(built())
    token, cache = torch.tensor([[5]]), paged(backend.decoder, 1, 8)
    last_logits(backend, token, cache)
    weight = backend.decoder.layers[0].attention.k_proj.weight
    weight.data = weight.data.t().contiguous()
    assert weight.shape[0] != weight.shape[1]
    with pytest.raises(RuntimeError, match="another shape than when the program was made"):
        last_logits(backend, token, cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@torch.no_grad()
def test_tokens_are_ids(dtype: torch.dtype) -> None:
    backend = quick(built())
    with pytest.raises(WorkhorseError, match=f"tokens have dtype {dtype}; give ids"):
        last_logits(backend, torch.ones(1, 1, dtype=dtype), paged(backend.decoder, 1, 8))


@torch.no_grad()
def test_a_hook_of_a_module_that_was_put_in_is_called() -> None:
    backend, other = quick(built()), quick(built(seed=1))
    decoder = backend.decoder
    tokens, cache = torch.randint(0, 61, (1, 8)), paged(decoder, 1, 8)
    last_logits(backend, tokens[:, :1], cache)
    decoder.layers[1].attention = other.decoder.layers[1].attention
    called: list[object] = []
    decoder.layers[1].attention.register_forward_hook(lambda *_: called.append(_))
    for n in range(1, 8):
        last_logits(backend, tokens[:, n : n + 1], cache)
    assert len(called) == 7


@torch.no_grad()
def test_a_weight_without_storage_is_refused() -> None:
    backend = quick(built())
    token, cache = torch.tensor([[5]]), paged(backend.decoder, 1, 8)
    last_logits(backend, token, cache)
    next(backend.decoder.layers[0].parameters()).untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the storage of a weight was freed"):
        last_logits(backend, token, cache)


def test_a_pickled_decoder_steps_in_another_process(tmp_path: Path) -> None:
    backend, tokens = quick(built()), torch.randint(0, 61, (1, 8))
    here = along(backend, tokens[:, :3], tokens)
    (tmp_path / "pickled").write_bytes(pickle.dumps((backend, tokens)))
    code = """
import pickle, sys, torch
from tests.execute.native_decoding.stepping import along
backend, tokens = pickle.load(open(sys.argv[1], "rb"))
torch.save(along(backend, tokens[:, :3], tokens), sys.argv[2])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "pickled"), str(tmp_path / "there")]
    subprocess.run(command, check=True)
    assert torch.equal(torch.load(tmp_path / "there"), here)


def test_a_copy_outlives_what_it_was_copied_from() -> None:
    backend, tokens = quick(built()), torch.randint(0, 61, (1, 8))
    expected = along(backend, tokens[:, :3], tokens)
    gone = _kept_weights(backend).number
    copied = copy.deepcopy(backend)
    del backend
    gc.collect()
    assert torch.equal(along(copied, tokens[:, :3], tokens), expected)
    _kept_weights(copied).number = gone
    with pytest.raises(RuntimeError, match=f"no weights are registered with id {gone}"):
        along(copied, tokens[:, :3], tokens)


def _kept_weights(backend: NativeStepBackend) -> KeptWeights:
    assert backend.translated is not None
    assert backend.translated.kept is not None
    assert backend.translated.kept.weights is not None
    return backend.translated.kept.weights
