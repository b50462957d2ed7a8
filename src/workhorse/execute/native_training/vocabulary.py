"""Embedding tables and log-probabilities for native training on a CPU."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workhorse.execute.body import NativeModule
from workhorse.native import Training
from workhorse.nn.embedding import Head, heads_in
from workhorse.nn.logprobs import WHOLE, HeadLoss, Shaping, TokenLogprobs
from workhorse.nn.products import Multiply, product
from workhorse.nn.surgery import as_subclass, mixin_class, replace_modules


class Float32SumEmbedding(NativeModule, nn.Embedding):
    """`nn.Embedding` that sums the gradients of each row in float32, also for bfloat16 tables.

    Attributes:
        tied: True if a head shares the table.
        operators: the operators of training, if available.
    """

    tied: bool
    operators: Training | None

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        learns = torch.is_grad_enabled() and weight.requires_grad
        if weight.dtype not in (torch.bfloat16, torch.float32) or not learns:
            return super().forward(input)
        return _LookUp.apply(input, weight, self.tied, self.operators)


def replace_embeddings(root: nn.Module, operators: Training | None = None) -> nn.Module:
    """Make the embedding tables in a module sum their gradients in float32.

    Args:
        root: the module.
        operators: the operators of training, which sum faster; None to sum with PyTorch.

    Returns:
        The module, or its replacement if it is a table itself.
    """
    of_heads = {head.proj.weight for head in heads_in(root)}

    def choose(module: nn.Module) -> nn.Module:
        if type(module) is not nn.Embedding:
            return module
        tied = module.weight in of_heads
        return as_subclass(module, Float32SumEmbedding, tied=tied, operators=operators)

    return replace_modules(root, choose)


class _LookUp(torch.autograd.Function):
    """Embedding look-up with a gradient that is summed in float32.

    PyTorch on a CPU sums the gradients of a bfloat16 row in bfloat16, where a frequent token's sum
    stops growing: 1,000 ones add up to 256. If the table gets another gradient too, from a tied
    head or an earlier micro-batch, this gradient is sparse. Autograd then adds its rows in place,
    without another tensor of the vocabulary's size.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: nn.Parameter, tied: bool, operators: Training | None
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.tied, ctx.operators = weight, tied, operators
        return nn.functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[None, Tensor, None, None]:
        (tokens,), weight = ctx.saved_tensors, ctx.weight
        ids, rows = tokens.flatten(), above[0].flatten(0, -2)
        summed = True
        if ctx.operators is not None:
            ids, rows = ctx.operators.sum_rows(
                ids.long().contiguous(), rows.contiguous(), len(weight)
            )
        elif weight.dtype != torch.float32:
            ids, rows = _summed(ids, rows)
        else:
            summed = False
        if not ctx.tied and weight.grad is None:
            dense = torch.zeros_like(weight)
            dense = dense.index_copy_(0, ids, rows) if summed else dense.index_add_(0, ids, rows)
            return None, dense, None, None
        sparse = torch.sparse_coo_tensor(
            ids[None], rows, weight.shape, is_coalesced=summed, check_invariants=False
        )
        return None, sparse, None, None


def _summed(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids, and for each the sum of its rows, computed in float32.

    The sums are cast to the dtype of the rows.
    """
    used, place = ids.unique(return_inverse=True)
    sums = rows.new_zeros(len(used), rows.shape[1], dtype=torch.float32)
    return used, sums.index_add_(0, place, rows.float()).to(rows.dtype)


class NativeLogprobs(NativeModule, TokenLogprobs):
    """`TokenLogprobs` that uses `multiplies` for gemms and a native operator for the scores."""

    multiplies: Multiply
    operators: Training | None

    def multiply(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.multiplies(a, b, bias)

    def matrix(self, head: Head) -> Tensor:
        return _Late.apply(head.proj.weight)

    def score(
        self, logits: Tensor, targets: Tensor, coefficients: Tensor | None, shaping: Shaping
    ) -> Tensor:
        plain = shaping.cap is not None or self.vocabulary is not WHOLE
        if self.operators is None or plain or not logits.is_contiguous():
            return super().score(logits, targets, coefficients, shaping)
        return self.operators.score_(
            logits, targets, coefficients, multiplier=shaping.multiplier, entropy=self.entropy
        )


class _Late(torch.autograd.Function):
    """The identity. Autograd computes its gradient after those of all operations called after it.

    An embedding table tied to the head then first gets the sparse gradient of its rows, and
    autograd adds it in place to the head's dense gradient. In the other order it would allocate a
    third tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> Tensor:
        return above[0]


def replace_logprobs(
    root: nn.Module, multiply: Multiply = product, operators: Training | None = None
) -> nn.Module:
    """Make the log-probabilities of heads in a module use native operators.

    Args:
        root: the module.
        multiply: the gemm.
        operators: the operators of training; None to compute the scores with PyTorch.

    Returns:
        The module, or its replacement if it computes log-probabilities itself.
    """

    def choose(module: nn.Module) -> nn.Module:
        if type(module) not in (HeadLoss, TokenLogprobs):
            return module
        kind = mixin_class("Native", NativeLogprobs, type(module))
        return as_subclass(module, kind, multiplies=multiply, operators=operators)

    return replace_modules(root, choose)
