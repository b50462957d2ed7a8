"""A pass over a compiled step's graph: products of one x with several weights become one.

A product of one row lasts some 50 microseconds, and around each of them threads are woken and wait
for the slowest. Queries, keys and values, and the branches of a gated feed-forward, read the same
x, so that the threads can share out all those weights at once.
"""

import operator

import torch
from torch import fx


def join_products(graph: fx.Graph) -> None:
    """Make one `linear_each` of several `linear` with the same x, in place."""
    by_input: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        # Without the native operators there is no such node, and no such name in torch.ops.
        if str(node.target) == "workhorse.linear.default" and _is_ready(*node.args[1:]):
            by_input.setdefault(node.args[0], []).append(node)
    for products in by_input.values():
        if len(products) > 1:
            _join(graph, products)


def _is_ready(*weight_and_bias: fx.Node | None) -> bool:
    """Whether they are there from the beginning, before the first of the products."""
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
