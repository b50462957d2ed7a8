"""Matmuls of one row, replaced by sums, give the same results; other matmuls are not replaced."""

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from workhorse.execute.compiled.step_compiler import sum_products


def layer(row: Tensor, rows: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return F.linear(row, weight), F.linear(row, weight, bias), F.linear(rows, weight)


def test_products_of_one_row_become_sums() -> None:
    given = torch.randn(1, 16), torch.randn(2, 16), torch.randn(8, 16), torch.randn(8)
    traced = make_fx(layer, tracing_mode="fake")(*given)
    sum_products(traced.graph, "cpu")
    traced.graph.lint()
    traced.recompile()
    targets = Counter(str(node.target) for node in traced.graph.nodes)
    assert targets["aten.mm.default"] == 1
    assert targets["aten.addmm.default"] == 0
    assert targets["aten.sum.dim_IntList"] == 2
    for found, expected in zip(traced(*given), layer(*given), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_bias_is_added_before_the_sum_is_rounded() -> None:
    """Matmuls and sums of small integers are exact in float32, but not in bfloat16."""
    row, weight = (torch.randint(-9, 10, (rows, 1024)).bfloat16() for rows in (1, 64))
    given = row, row, weight, torch.randint(-99, 100, (64,)).bfloat16()
    traced = make_fx(layer, tracing_mode="fake")(*given)
    sum_products(traced.graph, "cpu")
    traced.recompile()
    exact = row.float() @ weight.float().T + given[3].float()
    assert torch.equal(traced(*given)[1], exact.bfloat16())


def test_products_on_other_devices_stay() -> None:
    given = torch.randn(1, 16), torch.randn(2, 16), torch.randn(8, 16), torch.randn(8)
    traced = make_fx(layer, tracing_mode="fake")(*given)
    sum_products(traced.graph)
    assert not any(str(node.target) == "aten.sum.dim_IntList" for node in traced.graph.nodes)
