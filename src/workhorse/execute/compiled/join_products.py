"""A pass over a compiled step's graph: linear layers of the same x become one call.

A linear layer takes about 50 microseconds for one row, and at each of them threads are woken and
wait for the slowest. Queries, keys and values, and the branches of a gated feed-forward, read the
same x, so one call can divide all their weights among the threads.
"""

import operator

import torch
from torch import fx


def join_products(graph: fx.Graph) -> None:
    """Replace several `linear` of the same x by one `linear_each`, in place."""
    by_input: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        # Without the native operators there is no such node, and no such name in torch.ops.
        if str(node.target) == "workhorse.linear.default" and _is_ready(*node.args[1:]):
            by_input.setdefault(node.args[0], []).append(node)
    for products in by_input.values():
        if len(products) > 1:
            _join(graph, products)


def _is_ready(*weight_and_bias: fx.Node | None) -> bool:
    """Whether these are inputs of the graph, and so computed before the first of the products."""
    return all(given is None or given.op == "placeholder" for given in weight_and_bias)


def _join(graph: fx.Graph, products: list[fx.Node]) -> None:
    x, weights, biases = (list(of_all) for of_all in zip(*(p.args for p in products), strict=True))
    with graph.inserting_before(products[0]):
        each = graph.call_function(torch.ops.workhorse.linear_each.default, (x[0], weights, biases))
        parts = [graph.call_function(operator.getitem, (each, n)) for n in range(len(products))]
    each.meta["val"] = [product.meta["val"] for product in products]
    for part, product in zip(parts, products, strict=True):
        part.meta.update(product.meta)
        product.replace_all_uses_with(part)
        graph.erase_node(product)
