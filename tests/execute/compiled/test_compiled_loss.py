"""The compiled loss is the plain one, and its gradient too."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.nn.grid import COVERING, make
from workhorse.execute.compiled import compiled_loss
from workhorse.execute.compiled.compiled_loss import (
    CompiledHeadLoss,
    compile_loss,
    fused_loss_into_gradient,
)
from workhorse.nn import IGNORE, HeadLoss
from workhorse.nn.head import HeadConfig
from workhorse.nn.head_loss import Shaping, loss_into_gradient
from workhorse.train.objectives.next_token import NextToken

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
ROWS, VOCAB, WIDTH = 7, 29, 6


def targets() -> Tensor:
    chosen = torch.randint(VOCAB, (ROWS,))
    chosen[2:4] = IGNORE
    return chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shaping", [Shaping(), Shaping(0.3, None, 0.2), Shaping(2.0, 1.5, 0.2)])
def test_the_loss_for_the_compiler_is_the_plain_loss(shaping: Shaping, dtype: torch.dtype) -> None:
    logits, wanted = (torch.randn(ROWS, VOCAB) * 4).to(dtype), targets()
    logits[5, int(wanted[5])] = 80  # a loss of almost 0
    gradients = [logits.clone(), logits.clone()]
    expected = loss_into_gradient(gradients[0], wanted, shaping)
    found = fused_loss_into_gradient(gradients[1], wanted, shaping)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, check_dtype=False)
    loose = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(gradients[1], gradients[0], atol=loose, rtol=loose)


def test_a_loss_in_parts_is_the_plain_loss() -> None:
    head = HeadConfig(bias=True).build(VOCAB, WIDTH, WIDTH)
    given, wanted = torch.randn(1, ROWS, WIDTH), targets()[None]
    compiled = CompiledHeadLoss(max_logits=3 * VOCAB)  # 3 rows, 3 and 1
    results: list[list[Tensor | None]] = []
    for loss in (HeadLoss(), compiled):
        x = given.clone().requires_grad_()
        head.zero_grad()
        losses, _ = loss(x, wanted, head)
        losses.sum().backward()
        results.append([losses, x.grad, *(weight.grad for weight in head.parameters())])
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, atol=1e-5, rtol=1e-5)


def test_parts_of_different_sizes_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    program = torch.compile(fused_loss_into_gradient, backend=counter)
    monkeypatch.setattr(compiled_loss, "_compiled", lambda: program)
    for rows in (3, 5, 2):
        logits, wanted = torch.randn(rows, VOCAB), torch.randint(VOCAB, (rows,))
        CompiledHeadLoss().differentiate(logits, wanted, Shaping())
    assert counter.frame_count == 1


def test_compiling_the_loss_of_an_objective_replaces_it_once() -> None:
    objective = NextToken(make(COVERING[0]))
    compile_loss(objective)
    assert type(objective.head_loss) is CompiledHeadLoss
    compile_loss(objective)
    assert type(objective.head_loss) is CompiledHeadLoss
