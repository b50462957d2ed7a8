"""A pass over a compiled step's graph: a product of one row with a matrix becomes a sum.

For one row, a matrix-vector product, a GPU's library reached half of its memory's bandwidth. As a
sum the product is one of the compiler's own loops, which reads each number of the matrix once and
can compute the matrix on the way, from codes of 8 or 4 bits.
"""

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def sum_products(graph: fx.Graph, device: str = "cuda") -> None:
    """Replace `mm` and `addmm` of one row by sums, in place.

    Args:
        graph: of ATen's operators, with example values.
        device: the type of device whose products are replaced.
    """
    for node in list(graph.nodes):
        if node.target is aten.mm.default:
            bias, (x, matrix) = None, node.args
        elif node.target is aten.addmm.default and not node.kwargs:
            bias, x, matrix = node.args
        else:
            continue
        result = node.meta["val"]
        if result.device.type != device or result.shape[0] != 1:
            continue
        with graph.inserting_before(node):
            column = _call(graph, aten.unsqueeze.default, x, 2)
            each = _call(
                graph, aten.mul.Tensor, column, _call(graph, aten.unsqueeze.default, matrix, 0)
            )
            total = _call(graph, aten.sum.dim_IntList, each, [1], dtype=torch.float32)
            if bias is not None:
                total = _call(graph, aten.add.Tensor, total, bias)
            total = _call(graph, torch.ops.prims.convert_element_type.default, total, result.dtype)
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def _call(graph: fx.Graph, operator: Any, *arguments: Any, **options: Any) -> fx.Node:
    node = graph.call_function(operator, arguments, options)
    values = [one.meta["val"] if isinstance(one, fx.Node) else one for one in arguments]
    node.meta["val"] = operator(*values, **options)
    return node
