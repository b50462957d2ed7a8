"""Ahead-of-time compilation of decoding steps with PyTorch, with two graph passes of our own.

`join_products`: a linear layer takes about 50 microseconds for one row, and each one wakes the
threads and waits for the slowest. Queries, keys and values, and the branches of a gated
feed-forward, read the same x, so one call can divide all their weights among the threads.

`sum_products`: with one row, a matmul is a matrix-vector product, for which the GPU's library
reached only half of the memory bandwidth. Written as a sum, it becomes one of the compiler's own
loops. That loop reads each element of the matrix once, and can decode the matrix from codes of 8 or
4 bits as it reads.

Written for and tested with PyTorch 2.11 to 2.13:

- `torch.compile(…).aot_compile` and `torch.compiler.load_compiled_function` are public but
  experimental; so are `save_compiled_function` and `disable_guard_check` of their results;
- `torch._dynamo.mark_dynamic` is documented, but its name is private;
- `torch._dynamo.config` and `torch._inductor.custom_graph_pass` are private.

A stored program is a pickle: reading it can run code.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from workhorse.errors import WorkhorseError


def join_products(graph: fx.Graph) -> None:
    """Replace several `linear` nodes with the same input by one `linear_each` node, in place."""
    by_input: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        # Without the native operators there is no such node, and no such name in torch.ops.
        if str(node.target) == "workhorse.linear.default" and _is_ready(*node.args[1:]):
            by_input.setdefault(node.args[0], []).append(node)
    for products in by_input.values():
        if len(products) > 1:
            _join(graph, products)


def _is_ready(*weight_and_bias: fx.Node | None) -> bool:
    """True if weight and bias are graph inputs, so that they are available before any matmul."""
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


aten = torch.ops.aten


def sum_products(graph: fx.Graph, device: str = "cuda") -> None:
    """Replace `mm` and `addmm` nodes with one row in x by elementwise products and sums, in place.

    Args:
        graph: a graph of ATen operators with example values.
        device: the device type on which matmuls are replaced.
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


OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "alignment_asserts": False,
    "realize_opcount_threshold": 8,
}
"""Options of the compiler. Programs do not check shapes at every token. A value that needs more
than `realize_opcount_threshold` operations is computed once, not again for each operation that
reads it. Angles and masks are such values: every layer reads them."""

Varying = Iterable[tuple[Tensor, Sequence[int]]]
"""Tensors, each with the axes whose size may change between calls."""


class Program:
    """A compiled function.

    Args:
        compiled: the result of PyTorch's compiler.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._checked = False

    def __call__(self, *arguments: Any) -> Any:
        """Run the program. Only the first call checks that the arguments fit the program.

        Arguments of later calls must have the same properties. A check at every token would cost a
        twentieth of a small model's step.
        """
        result = self._compiled(*arguments)
        if not self._checked:
            self._compiled.disable_guard_check()
            self._checked = True
        return result

    def write(self, path: Path, known: dict[str, Any]) -> None:
        """Write the program to a file.

        Args:
            path: the file.
            known: objects that are not written, by name; they must be passed to `read`.

        Raises:
            OSError: the file cannot be written.
        """
        self._compiled.save_compiled_function(path, external_data=known)

    @classmethod
    def read(cls, file: BufferedReader, known: dict[str, Any]) -> "Program":
        """Read a program that `write` wrote.

        It raises an error if another version of a library wrote the program.

        Args:
            file: the open file.
            known: the objects that `write` was given, by name.
        """
        return cls(torch.compiler.load_compiled_function(file, external_data=known))


def compile_program(
    function: Callable[..., Any], arguments: tuple[Any, ...], varying: Varying
) -> Program:
    """Compile a function of tensors as one graph.

    Args:
        function: the function.
        arguments: example arguments.
        varying: the example tensors whose shapes vary between calls.

    Raises:
        WorkhorseError: the function cannot be compiled, or there is no C++ compiler.
    """
    for tensor, axes in varying:
        for axis in axes:
            torch._dynamo.mark_dynamic(tensor, axis)
    options: dict[str, Any] = {**OPTIONS, "post_grad_custom_pre_pass": _Products()}
    try:
        with torch._dynamo.config.patch(
            # Scalars of the config are constants: traced as variables they make the compiler
            # restart, by an exception that `aot_compile` does not catch (PyTorch 2.13).
            specialize_float=True,
            # Sizes of the model are constants too, even if other sizes were traced before.
            automatic_dynamic_shapes=False,
            enable_aot_compile=True,  # the default from PyTorch 2.12 on
        ):
            compiled: Any = torch.compile(function, fullgraph=True, options=options)
            return Program(compiled.aot_compile((arguments, {})))
    except RuntimeError as error:  # most often because there is no C++ compiler
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise WorkhorseError(
            f"cannot compile the decoding step of this model ({reason}); choose execution=auto"
        ) from error


class _Products(CustomGraphPass):
    """`join_products` and `sum_products` as a compiler pass."""

    def __call__(self, graph: fx.Graph) -> None:
        join_products(graph)
        sum_products(graph)

    def uuid(self) -> str:
        """Digest of this file, so that the compiler's cache notices changes of the passes."""
        return cast(bytes, get_hash_for_files((__file__,))).hex()
