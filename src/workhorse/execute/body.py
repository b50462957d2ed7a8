"""Bodies: copies of a model's modules that share its parameters and are executed in another way.

The reference is the model that `nn` builds. Every hook fires in it, and it is never changed. Native
operators, compiled programs and CUDA graphs replace modules of a body. The parameters are shared,
so every body computes with the values that training writes.
"""

# PyTorch has no public way to copy a module without its parameters.
# pyright: reportPrivateUsage=false

from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal, TypeVar, cast, get_args

from torch import Tensor, nn

from workhorse.errors import WorkhorseError
from workhorse.nn.decoder import Decoder, decoders_in
from workhorse.transforms.record import is_body, mark_body, mark_sharing

Execution = Literal["auto", "reference", "native", "compiled"]
"""`reference`: the unchanged modules of `nn`, run by PyTorch. `native`: Workhorse's operators on a
CPU, and decoding steps as CUDA graphs on CUDA. `compiled`: PyTorch's compiler for everything
without a native operator, with CUDA graphs on CUDA. `auto`: `native` if possible, otherwise
`reference`."""
EXECUTIONS: tuple[Execution, ...] = get_args(Execution)
Root = TypeVar("Root", bound=nn.Module)


class NativeModule(nn.Module):
    """A mixin for modules of a body that native operators compute."""

    def computed(self) -> Iterable[nn.Module]:
        """The modules that native operators compute when this module is called."""
        return self.modules()


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def body_of(reference: Root) -> Root:
    """Make a body of a model: a copy of its modules with the same parameters and without hooks.

    Call it after weights are cast or replaced, because later replacements do not reach the body.
    Shared modules and shared parameters stay shared.

    Args:
        reference: the module tree as built; not a body, because its modules may be replaced.
    """
    assert not is_body(reference), "a body is made from the reference"
    check_own_weights(reference)
    body = copied(reference)
    for decoder in decoders_in(body):
        mark_body(decoder)
    return body


def sharing_copy(reference: Decoder) -> Decoder:
    """Copy the modules of a reference, so that the copy can get an adapter over the same weights.

    The copy is a reference too. It has no hooks.
    """
    assert not is_body(reference), "a reference is copied"
    check_own_weights(reference)
    made = copied(reference)
    mark_sharing(made)
    return made


def check_own_weights(root: nn.Module) -> None:
    """Raise an error if a hook computes a weight, because a body is a copy without hooks.

    Raises:
        WorkhorseError: a hook, such as one of `torch.nn.utils.prune`, computes a weight before each
            forward pass.
    """
    for path, module in root.named_modules():
        computed = [
            name for name in ("weight", "bias") if isinstance(vars(module).get(name), Tensor)
        ]
        for name in computed:
            raise WorkhorseError(
                f"a hook computes {path}.{name} before each forward pass; make it permanent "
                "(torch.nn.utils.prune.remove), or use torch.nn.utils.parametrize"
            )


def with_parameters_of(reference: Root, other: nn.Module) -> Root:
    """Copy a module tree without hooks, and give the copy the parameters of another tree.

    Args:
        reference: the module tree as built; its own parameters may have no data.
        other: a body of `reference` whose parameters were replaced, for example sharded by FSDP.
    """
    made = copied(reference)
    for name, module in made.named_modules():
        module._parameters = other.get_submodule(name)._parameters.copy()
    return made


def copied(root: Root, copies: dict[nn.Module, nn.Module] | None = None) -> Root:
    """Copy a module tree, with the same parameters and without hooks.

    Args:
        root: root of the tree.
        copies: the modules that were copied already, with their copies; new copies are added.
    """
    copies = {} if copies is None else copies
    if root not in copies:
        made = copies[root] = type(root).__new__(type(root))
        vars(made).update(vars(root))
        for name in _HOOKS:
            vars(made)[name] = OrderedDict()
        made._parameters = root._parameters.copy()
        made._buffers = root._buffers.copy()
        # An empty container is falsy, so the test is for None.
        made._modules = {
            name: None if child is None else copied(child, copies)
            for name, child in root._modules.items()
        }
    return cast(Root, copies[root])
