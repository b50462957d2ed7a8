"""Rounding options of configs: where float32 replaces bfloat16."""

import torch

from workhorse.nn.attention.self_attention import make_rotation
from workhorse.nn.context import Context
from workhorse.nn.embedding import EmbeddingConfig
from workhorse.nn.positions.rope import RopeConfig, rotate_half

SQRT_3072 = 55.42562584220407  # 55.5 in bfloat16


def test_a_rounded_multiplier() -> None:
    tokens, positions = torch.arange(7)[None], torch.arange(7)[None]
    results = []
    for rounded in (True, False):
        config = EmbeddingConfig(multiplier=SQRT_3072, round_multiplier=rounded)
        embedding = config.build(7, 64, 8).bfloat16()
        torch.nn.init.normal_(embedding.tokens.weight, generator=torch.Generator().manual_seed(0))
        results.append(embedding(tokens, positions))
        factor = 55.5 if rounded else SQRT_3072
        assert torch.equal(results[-1][0], (embedding.tokens.weight.float() * factor).bfloat16())
    assert not torch.equal(*results)


def test_a_rotation_in_float32() -> None:
    x = torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    context = Context(1, 9, x.device)
    exact, native = (
        make_rotation(RopeConfig(precision=precision), 16)(x, context)
        for precision in ("float32", "native")
    )
    angles = RopeConfig().angles(context.positions, 16, 9)
    assert torch.equal(exact, rotate_half(x.float(), *angles).bfloat16())
    assert exact.dtype == native.dtype == torch.bfloat16
    assert not torch.equal(exact, native)
