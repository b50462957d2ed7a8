"""Sequences divided among processes: every causal decoder of the grid gives what it gives whole."""

from pathlib import Path

import pytest
import torch
from torch import multiprocessing

from tests.nn.grid import CAUSAL, COVERING, make
from tests.parallel.teams import MEMBERS, compare_all
from workhorse.errors import WorkhorseError
from workhorse.parallel.sequences import check_divisible


def test_three_members_pass_as_one(tmp_path: Path) -> None:
    """All in one test, so that processes are started once; with documents and without."""
    multiprocessing.spawn(compare_all, args=(str(tmp_path),), nprocs=MEMBERS)
    for config, differences in zip(CAUSAL, torch.load(tmp_path / "differences"), strict=True):
        assert max(differences) < 1e-5, config


def test_attention_that_looks_ahead_is_refused() -> None:
    ahead = next(config for config in COVERING if config not in CAUSAL)
    with pytest.raises(WorkhorseError, match="context=2 divides sequences, of which causal=false"):
        check_divisible(make(ahead), 2)


def test_a_kernel_of_one_length_is_refused() -> None:
    config = next(
        one for one in CAUSAL if not any(b.attention.dropout for b in one.blocks.values())
    )
    with pytest.raises(WorkhorseError, match="context=2 does not go with kernel=flex"):
        check_divisible(config.build("flex"), 2)
