"""Decoders of the grid with divided sequences and experts give the same results as whole ones."""

from pathlib import Path

import pytest

from tests.nn.grid import CAUSAL, COVERING, mixes_experts
from tests.parallel.teams import DOCUMENTS, check_experts, check_parts
from workhorse.config.base import ConfigError
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.kernels import KernelName
from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.division.parts import check_divisible


@pytest.mark.parametrize("first", [0, 4])
def test_three_members_pass_as_one(tmp_path: Path, first: int) -> None:
    """Runs a part of the grid, alternately with and without documents; a campaign runs all."""
    context = [ParallelismConfig(context=3)]
    check_parts(tmp_path, context, CAUSAL[first::8], [[None], [DOCUMENTS]])


def test_three_members_have_the_experts_of_one(tmp_path: Path) -> None:
    check_experts(tmp_path)


AHEAD = next(config for config in COVERING if config not in CAUSAL)
DENSE = next(config for config in CAUSAL if not mixes_experts(config))
MIXED = next(config for config in CAUSAL if mixes_experts(config))


@pytest.mark.parametrize(
    ("config", "kernel", "ways", "said"),
    [
        (AHEAD, "auto", {"context": 2}, "context=2 needs causal attention, but the model has caus"),
        (DENSE, "flex", {"context": 2}, "context=2 is not supported with train.kernel=flex"),
        (DENSE, "auto", {"data": 2, "expert": 2}, "expert=2 needs routed experts, but the model h"),
        (MIXED, "auto", {"data": 5, "expert": 5}, "expert=5 does not divide n_experts="),
        (DENSE, "auto", {"tensor": 7}, "tensor=7 does not divide n_heads="),
    ],
)
def test_what_a_model_cannot_be_divided_into(
    config: DecoderConfig, kernel: KernelName, ways: dict[str, int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_divisible(config, kernel, ParallelismConfig(**ways))
