"""PyTorch's compiler, ahead of time: all of our uses of interfaces without promised stability.

Written for and tested with PyTorch 2.11 to 2.13:

- `torch.compile(…).aot_compile` and `torch.compiler.load_compiled_function` are public, and called
  experimental; so are `save_compiled_function` and `disable_guard_check` of what they return;
- `torch._dynamo.mark_dynamic` is documented, and private by its name;
- `torch._dynamo.config` and `torch._inductor.custom_graph_pass` are private.

A kept program is a pickle: reading one runs code.
"""

from collections.abc import Callable, Iterable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from workhorse.errors import WorkhorseError
from workhorse.execute.compiled import join_products, sum_products

OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "alignment_asserts": False,
    "realize_opcount_threshold": 8,
}
"""Options of the compiler. Programs need not check shapes at every token. A result of more than
this many operations is computed once for all its readers instead of again by each: angles and
masks, which every layer reads."""

Varying = Iterable[tuple[Tensor, Sequence[int]]]
"""Tensors, each with the axes whose size may change from call to call."""


class Program:
    """A compiled function.

    Args:
        compiled: what PyTorch's compiler returned.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._checked = False

    def __call__(self, *arguments: Any) -> Any:
        """The function's result. Only the first call checks that its arguments fit the program.

        Later arguments must be like the first; a check at every token would cost a twentieth of a
        small model's step.
        """
        result = self._compiled(*arguments)
        if not self._checked:
            self._compiled.disable_guard_check()
            self._checked = True
        return result

    def write(self, path: Path, known: dict[str, Any]) -> None:
        """Write the program without the objects in `known`, which `read` is given again.

        Raises:
            OSError: it cannot be written.
        """
        self._compiled.save_compiled_function(path, external_data=known)

    @classmethod
    def read(cls, file: BufferedReader, known: dict[str, Any]) -> "Program":
        """A program written by the same versions of all libraries; with others this raises."""
        return cls(torch.compiler.load_compiled_function(file, external_data=known))


def compile_program(
    function: Callable[..., Any], arguments: tuple[Any, ...], varying: Varying
) -> Program:
    """Compile a function of tensors as a whole.

    Args:
        function: to compile.
        arguments: an example.
        varying: the tensors of the example whose shapes vary.

    Raises:
        WorkhorseError: the compiler cannot translate it, or there is no C++ compiler.
    """
    for tensor, axes in varying:
        for axis in axes:
            torch._dynamo.mark_dynamic(tensor, axis)
    options: dict[str, Any] = {**OPTIONS, "post_grad_custom_pre_pass": _Products()}
    try:
        with torch._dynamo.config.patch(
            # Numbers of the config are constants: traced as variables they make the compiler
            # restart, by an exception that `aot_compile` does not catch (PyTorch 2.13).
            specialize_float=True,
            # So are sizes of the model, although this code may have been traced for another one.
            automatic_dynamic_shapes=False,
            enable_aot_compile=True,  # the default from PyTorch 2.12 on
        ):
            compiled: Any = torch.compile(function, fullgraph=True, options=options)
            return Program(compiled.aot_compile((arguments, {})))
    except RuntimeError as error:  # most often because there is no C++ compiler
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise WorkhorseError(
            f"the compiler cannot do this model's step ({reason}); leave compile out"
        ) from error


class _Products(CustomGraphPass):
    """`join_products` and `sum_products` in the form of a compiler pass."""

    def __call__(self, graph: fx.Graph) -> None:
        join_products.join_products(graph)
        sum_products.sum_products(graph)

    def uuid(self) -> str:
        """A digest of what it does, for the compiler's own cache."""
        files = join_products.__file__, sum_products.__file__
        return cast(bytes, get_hash_for_files(files)).hex()
