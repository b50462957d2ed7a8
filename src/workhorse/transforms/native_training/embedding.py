"""Embedding tables that are trained on a CPU: gradients are summed in float32."""

from typing import Any

import torch
from torch import Tensor, nn

from workhorse.transforms.replace import become, replace_modules


class Float32SumEmbedding(nn.Embedding):
    """`nn.Embedding`, the gradient of a row summed in float32 whatever its type."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        learns = torch.is_grad_enabled() and weight.requires_grad
        if weight.dtype not in (torch.bfloat16, torch.float32) or not learns:
            return super().forward(input)
        return _LookUp.apply(input, weight.detach().requires_grad_(), self)


def replace_embeddings(root: nn.Module) -> nn.Module:
    """Let the tables in a module sum their gradients in float32.

    Returns:
        The module, or what stands for it if it is one itself.
    """

    def choose(module: nn.Module) -> nn.Module:
        return become(module, Float32SumEmbedding) if type(module) is nn.Embedding else module

    return replace_modules(root, choose)


class _LookUp(torch.autograd.Function):
    """An embedding on a CPU, where PyTorch sums a row's gradients in bfloat16 if it is bfloat16.

    A frequent token's sum stops growing there: 1,000 ones make 256. The rows are added to `grad`
    right here, since autograd would let the gradient of a head tied to the table wait for this one
    and make two more tensors of the vocabulary's size.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, values: Tensor, table: nn.Embedding) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.table = table
        return nn.functional.embedding(tokens, values)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[None, None, None]:
        (tokens,), (gradient,) = ctx.saved_tensors, above
        weight: nn.Parameter = ctx.table.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        if weight.dtype == torch.float32:
            weight.grad.index_add_(0, tokens.flatten(), gradient.flatten(0, -2))
            return None, None, None
        used, place = tokens.unique(return_inverse=True)
        rows = gradient.new_zeros(len(used), weight.shape[1], dtype=torch.float32)
        rows.index_add_(0, place.flatten(), gradient.flatten(0, -2).float())
        weight.grad[used] = (weight.grad[used] + rows).to(weight.dtype)
        return None, None, None
