"""Joined matmuls give the same results, and no other operations are joined."""

from collections import Counter

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.native.machine import DECODING, needs
from workhorse.execute.compiled.step_compiler import join_products

pytestmark = needs("decoding")


def test_products_of_one_input_become_one() -> None:
    def layer(x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        y = DECODING.linear(x, q).relu()
        y = y + DECODING.linear(x, k).repeat(1, 2) * DECODING.linear(x, v, bias).repeat(1, 2)
        late = DECODING.linear(x, q * 2)  # this weight is not there before the first product
        return DECODING.linear(y, q) + torch.nn.functional.linear(x, q) + late

    weights = (torch.randn(wide, 16) for wide in (16, 8, 8))
    given = (torch.randn(2, 16), *weights, torch.randn(8))
    traced = make_fx(layer)(*given)
    join_products(traced.graph)
    traced.graph.lint()
    traced.recompile()
    targets = Counter(str(node.target) for node in traced.graph.nodes)
    assert targets["workhorse.linear_each.default"] == 1
    assert targets["workhorse.linear.default"] == 2
    assert torch.equal(traced(*given), layer(*given))
