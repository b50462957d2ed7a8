"""Joined products are the same products, and nothing else is joined."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from workhorse import native
from workhorse.transforms.join_products import join_products

pytestmark = pytest.mark.skipif(
    native.why_not(wait=True) is not None, reason=f"no native operators: {native.why_not()}"
)


def test_products_of_one_input_become_one() -> None:
    def layer(x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        y = native.linear(x, q).relu()
        y = y + native.linear(x, k).repeat(1, 2) * native.linear(x, v, bias).repeat(1, 2)
        late = native.linear(x, q * 2)  # this weight is not there before the first product
        return native.linear(y, q) + torch.nn.functional.linear(x, q) + late

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
