"""Decoding with the native attention gives the same logits, for every kind of attention."""

from typing import Any

import pytest
import torch

from tests.native.machine import DECODING, needs
from tests.nn.grid import CAUSAL, COVERING, error, fixed_length, make, name, random_tokens
from tests.nn.paged import paged
from workhorse.execute.native_decoding.layers import DecodingSdpa, attend_natively
from workhorse.native import Decoding
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.kernels import Sdpa

pytestmark = needs("decoding")
configs = [config for config in CAUSAL if fixed_length(config) is None]


@pytest.mark.parametrize("config", configs, ids=lambda config: name(COVERING.index(config)))
@torch.no_grad()
def test_a_ragged_batch_decodes_to_the_same_logits(
    config: DecoderConfig,
) -> None:
    plain, quick = make(config), make(config)
    attend_natively(quick, DECODING)
    tokens = random_tokens(config, 2, 12)
    positions = torch.tensor([[0, 1, 2, 3], [-1, -1, 0, 1]])
    caches = paged(plain, 2, 12), paged(quick, 2, 12)
    for decoder, cache in zip((plain, quick), caches, strict=True):
        decoder(tokens[:, :4], positions=positions, cache=cache)
    for step in range(4, 12):
        following = tokens[:, step : step + 1]
        expected = plain.next_logits(following, cache=caches[0])
        assert error(quick.next_logits(following, cache=caches[1]), expected) <= 1e-5


def test_the_operator_is_used_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.Size] = []
    attend = Decoding.attend

    def watched(operators: Decoding, q: torch.Tensor, *rest: Any, **seen: Any) -> torch.Tensor:
        used.append(q.shape)
        return attend(operators, q, *rest, **seen)

    monkeypatch.setattr(Decoding, "attend", watched)
    config = next(
        config
        for config in configs
        if any(isinstance(part, DecodingSdpa) for part in _quick(config).modules())
    )
    decoder = _quick(config)
    tokens = random_tokens(config, 2, 5)
    with torch.no_grad():
        cache = paged(decoder, 2, 5)
        decoder(tokens[:, :4], cache=cache)
        assert not used
        decoder.next_logits(tokens[:, 4:], cache=cache)
    assert used
    used.clear()
    decoder(tokens[:, :1])  # a gradient may be wanted
    assert not used


@pytest.mark.parametrize("window", [None, 20])
@torch.no_grad()
def test_prompts_with_alibi_need_no_mask(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in two parts, longer than the operator takes without ALiBi, and one token more."""
    attention = {"n_heads": 6, "n_kv_heads": 2, "position": {"kind": "alibi"}, "window": window}
    blocks = {"main": {"kind": "pre_norm", "norm": {"kind": "rms_norm"}, "attention": attention}}
    blocks["main"]["feed_forward"] = {"kind": "mlp", "d_ff": 24}
    sizes = {"vocab_size": 61, "d_model": 48, "n_layers": 2, "max_seq_len": 90}
    config = DecoderConfig.from_dict(sizes | {"blocks": blocks})
    tokens, logits = random_tokens(config, 2, 81), []
    for decoder in (make(config), _quick(config)):
        cache = paged(decoder, 2, 81)
        parts = tokens.split((40, 40, 1), dim=1)
        logits.append(torch.cat([decoder(part, cache=cache) for part in parts], dim=1))
        if window is None:
            monkeypatch.setattr(Sdpa, "forward", None)  # the operator must do it
    assert error(logits[1], logits[0]) <= 1e-5


def _quick(config: DecoderConfig) -> torch.nn.Module:
    decoder = make(config)
    attend_natively(decoder, DECODING)
    return decoder
