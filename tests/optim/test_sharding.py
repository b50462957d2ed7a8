"""Training with weights, gradients and optimizer sharded over two ranks equals one rank's."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.optim.sharded import PROCESSES, STEPS, Training, possible_cases, train_all, trained
from tests.parallel.forked import start

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)

BOUNDS = {"float32": (2e-5, 1e-4), "bfloat16": (1e-3, 5e-3)}
"""Bounds of the differences: of losses, in nats, and of the gradient norm, relative.

Each rank sums the gradients of half the rows, so float32 sums have another order. In so few steps,
AdamW and Muon turn the last bits of a small gradient into a larger share of a step (measured: 8e-6
and 4e-5). In bfloat16 each half is rounded, and their sum too, each time by up to 0.4 % (measured:
2e-4 and 6e-4).
"""


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """All cases are in one test, so that two processes are started only once."""
    start(train_all, (str(tmp_path),), PROCESSES)
    results = torch.load(tmp_path / "results")
    for case in possible_cases():
        one, two = trained(case), Training(**results[str(case)])
        assert two.sharded, case
        loss, length = BOUNDS[case.dtype]
        assert two.losses == pytest.approx(one.losses, abs=loss), case
        assert two.grad_norms == pytest.approx(one.grad_norms, rel=length), case
        assert one.losses[0] - one.losses[-1] > 20 * loss, case
        assert two.weights.keys() == one.weights.keys()
        assert two.state.keys() == one.state.keys()
        for name, weight in one.weights.items():
            moved = STEPS * 3e-3  # the distance that AdamW moves a weight at this learning rate
            assert (two.weights[name] - weight).abs().max() < 0.5 * moved, (case, name)
