"""Compiled log-probabilities and their gradient equal the plain ones."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.nn.grid import COVERING, make
from workhorse.execute import training
from workhorse.execute.training import CompiledLogprobs, compile_logprobs
from workhorse.nn import IGNORE, HeadLoss, TokenLogprobs
from workhorse.nn.embedding import HeadConfig
from workhorse.nn.logprobs import PLAIN, Shaping, score
from workhorse.train.objectives.next_token import NextToken

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
ROWS, VOCAB, WIDTH = 7, 29, 6


def targets() -> Tensor:
    chosen = torch.randint(VOCAB, (ROWS,))
    chosen[2:4] = IGNORE
    return chosen


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shaping", [PLAIN, Shaping(0.3, None), Shaping(2.0, 1.5)])
def test_what_the_compiler_sees_is_the_plain_function(
    monkeypatch: pytest.MonkeyPatch, shaping: Shaping, dtype: torch.dtype, entropy: bool
) -> None:
    logits, wanted = (torch.randn(ROWS, VOCAB) * 4).to(dtype), targets()
    logits[5, int(wanted[5])] = 80  # a loss of almost 0
    by = torch.randn(ROWS, 4, dtype=torch.promote_types(dtype, torch.float32))
    gradients = [logits.clone(), logits.clone()]
    expected = score(gradients[0], wanted, by, shaping=shaping, entropy=entropy)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = score(gradients[1], wanted, by, shaping=shaping, entropy=entropy)
    assert torch.equal(found, expected)
    loose = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(gradients[1], gradients[0], atol=loose, rtol=loose)


@pytest.mark.parametrize("kind", [HeadLoss, TokenLogprobs])
def test_a_loss_in_parts_is_the_plain_loss(kind: type[TokenLogprobs]) -> None:
    head = HeadConfig(bias=True).build(VOCAB, WIDTH, WIDTH)
    given, wanted = torch.randn(1, ROWS, WIDTH), targets()[None]
    compiled = torch.nn.Sequential(kind(max_logits=3 * VOCAB))  # 3 rows, 3 and 1
    compile_logprobs(compiled)
    results: list[list[Tensor | None]] = []
    for way in (kind(), compiled[0]):
        x = given.clone().requires_grad_()
        head.zero_grad()
        found = way(x, wanted, head)[0]
        found.sum().backward()
        results.append([found, x.grad, *(weight.grad for weight in head.parameters())])
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, atol=1e-5, rtol=1e-5)


def test_parts_of_different_sizes_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    program = torch.compile(score, backend=counter)
    monkeypatch.setattr(training, "_compiled", lambda: program)
    for rows in (3, 5, 2):
        logits, wanted = torch.randn(rows, VOCAB), torch.randint(VOCAB, (rows,))
        CompiledLogprobs().score(logits, wanted, torch.randn(rows, 4), PLAIN)
    assert counter.frame_count == 1


def test_compiling_an_objective_replaces_them_once() -> None:
    objective = NextToken(make(COVERING[0]))
    compile_logprobs(objective)
    once = objective.logprobs
    assert isinstance(once, CompiledLogprobs)
    assert isinstance(once, HeadLoss)
    compile_logprobs(objective)
    assert objective.logprobs is once
