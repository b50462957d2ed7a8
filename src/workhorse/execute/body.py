"""Bodies: copies of a model's modules that share its parameters and are executed by other means.

The reference is what `nn` builds: every hook fires, and it is never changed. Native operators,
compiled programs and recorded steps replace modules of a body. Since parameters are shared, what
training writes into them is what every body computes with.
"""

# PyTorch has no public way to copy a module without its parameters.
# pyright: reportPrivateUsage=false

from collections import OrderedDict
from typing import Literal, TypeVar, cast, get_args

from torch import Tensor, nn

from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder
from workhorse.transforms.record import is_body, mark_body

Execution = Literal["auto", "reference", "native", "compiled"]
"""`reference`: the modules of `nn` as they stand, by PyTorch. `native`: operators of ours on a CPU,
steps recorded as CUDA graphs on CUDA. `compiled`: programs of PyTorch's compiler where there is
nothing native, on CUDA recorded as graphs. `auto`: native as far as there is something."""
EXECUTIONS: tuple[Execution, ...] = get_args(Execution)
Root = TypeVar("Root", bound=nn.Module)

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
    """A copy of a module tree that has the same parameters and buffers, and no hooks.

    To be made after weights were cast or replaced: it holds those that the reference has now. A
    module with several names, and a parameter of several modules, stay one.

    Args:
        reference: as built; not a body, whose modules may be bound to what replaced them.
    """
    assert not is_body(reference), "a body is made from the reference"
    check_own_weights(reference)
    body = _copy(reference)
    for module in body.modules():
        if isinstance(module, Decoder):
            mark_body(module)
    return body


def check_own_weights(root: nn.Module) -> None:
    """Refuse weights that a hook computes before each forward pass: a body has no hooks.

    Raises:
        WorkhorseError: a module was changed by `torch.nn.utils.prune`, `weight_norm` or the like.
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
    """A copy of a module tree that has the parameters of another one, and no hooks.

    Args:
        reference: as built; its own parameters may be without data.
        other: a body of it, whose parameters were replaced, such as one that FSDP shards.
    """
    made = _copy(reference)
    for name, module in made.named_modules():
        module._parameters = other.get_submodule(name)._parameters.copy()
    return made


def _copy(root: Root) -> Root:
    copies: dict[nn.Module, nn.Module] = {}

    def copy(module: nn.Module) -> nn.Module:
        if module not in copies:
            made = copies[module] = type(module).__new__(type(module))
            vars(made).update(vars(module))
            for name in _HOOKS:
                vars(made)[name] = OrderedDict()
            made._parameters = module._parameters.copy()
            made._buffers = module._buffers.copy()
            children = module._modules.items()
            made._modules = {name: child and copy(child) for name, child in children}
        return copies[module]

    return cast(Root, copy(root))
