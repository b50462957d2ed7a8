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

from tests.native.machine import needs
from tests.nn.grid import error
from tests.nn.paged import paged
from tests.transforms.steps.stepping import along, built, quick
from workhorse.errors import WorkhorseError

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
    if dtype != torch.bfloat16:  # no operator has it, so the modules compute
        assert error(cast.to(first.dtype), first) <= 2e-3


@pytest.mark.parametrize("change", ["cast", "load"])
def test_parameters_may_be_swapped_after_a_step(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """PyTorch swaps a parameter only if its module alone refers to it."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    decoder, expected = quick(built()), quick(built(seed=1))
    tokens = torch.randint(0, 61, (1, 8))
    along(decoder, tokens[:, :3], tokens)
    if change == "cast":
        decoder, expected = decoder.bfloat16(), quick(built().bfloat16())
    else:
        decoder.load_state_dict(expected.state_dict())
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
from tests.transforms.steps.stepping import along
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
    with pytest.raises(RuntimeError, match=f"no weights are kept as number {gone}"):
        along(copied, tokens[:, :3], tokens)
