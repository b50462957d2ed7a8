"""PyTorch's compiler, ahead of time: all that we use of it which PyTorch does not promise to keep.

Written for and tested with PyTorch 2.11 to 2.13. Of these:

- `torch.compile(…).aot_compile` and `torch.compiler.load_compiled_function` are public, and called
  experimental; so are `save_compiled_function` and `disable_guard_check` of what they return;
- `torch._dynamo.mark_dynamic` is documented, and private by its name;
- `torch._dynamo.config` and `torch._inductor.custom_graph_pass` are private.

A kept program is a pickle: reading one runs what it says.
"""

from collections.abc import Callable, Iterable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from workhorse.errors import WorkhorseError
from workhorse.transforms import join_products

OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "alignment_asserts": False,
    "realize_opcount_threshold": 8,
}
"""Of the compiler. What was compiled for these shapes need not look at them at every token. What
takes more than so many operations is computed once for all that read it, not by each anew: angles
and masks, which every layer reads."""

Varying = Iterable[tuple[Tensor, Sequence[int]]]
"""Tensors, each with the axes whose size may be another at the next call."""


class Program:
    """A compiled function.

    Args:
        compiled: what PyTorch's compiler returned.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._checked = False

    def __call__(self, *arguments: Any) -> Any:
        """What the function gives. Whether arguments fit the program is looked at once.

        All later ones must be like the first; to look again at every token costs a twentieth of a
        small model's step.
        """
        result = self._compiled(*arguments)
        if not self._checked:
            self._compiled.disable_guard_check()
            self._checked = True
        return result

    def write(self, path: Path, known: dict[str, Any]) -> None:
        """Write the program without the objects in `known`, which are given again to `read`.

        Raises:
            OSError: it cannot be written.
        """
        self._compiled.save_compiled_function(path, external_data=known)

    @classmethod
    def read(cls, file: BufferedReader, known: dict[str, Any]) -> "Program":
        """A program that was written by the same versions of everything; otherwise it raises."""
        return cls(torch.compiler.load_compiled_function(file, external_data=known))


def compile_program(
    function: Callable[..., Any], arguments: tuple[Any, ...], varying: Varying
) -> Program:
    """Compile a function of tensors as a whole.

    Args:
        function: what to compile.
        arguments: an example.
        varying: those tensors of the example that will come in other shapes.

    Raises:
        WorkhorseError: the compiler cannot translate it, or there is none.
    """
    for tensor, axes in varying:
        for axis in axes:
            torch._dynamo.mark_dynamic(tensor, axis)
    options: dict[str, Any] = {**OPTIONS, "post_grad_custom_pre_pass": _JoinProducts()}
    try:
        with torch._dynamo.config.patch(
            # Numbers of the config are constants. Traced as variables they make the compiler begin
            # anew, which it does by an exception that `aot_compile` lets through (PyTorch 2.13).
            specialize_float=True,
            # So are sizes of the model, though this code may have seen another model's before.
            automatic_dynamic_shapes=False,
            enable_aot_compile=True,  # the default from PyTorch 2.12 on
        ):
            compiled: Any = torch.compile(function, fullgraph=True, options=options)
            return Program(compiled.aot_compile((arguments, {})))
    except RuntimeError as error:  # no C++ compiler above all
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise WorkhorseError(
            f"the compiler cannot do this model's step ({reason}); leave compile out"
        ) from error


class _JoinProducts(CustomGraphPass):
    """`join_products` as the compiler wants a pass."""

    def __call__(self, graph: fx.Graph) -> None:
        join_products.join_products(graph)

    def uuid(self) -> str:
        """Of what it does, for the compiler's own cache."""
        return cast(bytes, get_hash_for_files((join_products.__file__,))).hex()
