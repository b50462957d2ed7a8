"""Weights, gradients and optimizer spread over two processes: the training of one process."""

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
"""Of losses, in nats, and of the gradient's length, relative.

Half the rows' gradients are summed by one process and half by the other, so float32 sums are of
another order: an AdamW or Muon of so few steps turns the last bits of a small gradient into more of
a step (seen: 8e-6 and 4e-5). In bfloat16 each half is rounded, and their sum too, each time by up
to 0.4 % (seen: 2e-4 and 6e-4).
"""


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """All cases in one test, so that two processes are started once."""
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
            moved = STEPS * 3e-3  # of a weight by AdamW, at that learning rate
            assert (two.weights[name] - weight).abs().max() < 0.5 * moved, (case, name)
