"""Record which module of a decoder, or of one block, computes which value.

Native forms of a model are derived from such a recording. How the modules of a model are connected
is therefore defined only once, in `nn`.
"""

import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workhorse.execute.body import copied
from workhorse.nn import Decoder
from workhorse.nn.convolution import SubLayer
from workhorse.nn.elementwise import is_identity

ADDITIONS = (torch.add, Tensor.add, Tensor.__add__)
QUESTIONS = ("__get__", "dim", "is_floating_point", "numel", "size", "stride")
"""Names of functions that read only the metadata of a tensor."""


class CannotTranslate(Exception):
    """A decoder computes something for which there is no instruction."""


class Computed(NamedTuple):
    """A recorded computation: the forward pass of a module, or the sum of two values.

    Attributes:
        module: the module that computed it; None for the sum of the inputs.
        inputs: ids of the input values.
        output: id of the output value; the id of an input if the module returned that input.
        method: name of the method that computed it; "forward" except in `record_layer`.
    """

    module: nn.Module | None
    inputs: tuple[int, ...]
    output: int
    method: str = "forward"


def record_modules(decoder: Decoder, known: Callable[[nn.Module], bool]) -> list[Computed]:
    """Run a decoder on one token, and record the computations of known modules and sums in order.

    The token has the id 0.

    Args:
        decoder: the decoder.
        known: returns True if a module is recorded as one computation; otherwise its children are
            recorded.

    Raises:
        CannotTranslate: the decoder computes something other than known modules and sums.
    """
    recorder = _Recorder()
    token = torch.zeros(1, 1, dtype=torch.int64, device=decoder.device)
    recorder.number(token)
    with torch.no_grad(), ExitStack() as hooks:
        for module in decoder.modules():
            ours = recorder.enter, recorder.leave
            enter, leave = ours if known(module) else (recorder.begin, recorder.end)
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        hooks.enter_context(recorder)
        logits = decoder(token)
    if recorder.foreign is None and recorder.computed[-1].output != recorder.number(logits):
        recorder.foreign = "operations after the last module"
    if recorder.foreign is not None:
        raise CannotTranslate(recorder.foreign)
    return recorder.computed


class Layer(NamedTuple):
    """A recorded layer.

    The ids of its inputs are 0 for x, 1 for the context and 2 for the cache entry. The cache
    entries of convolutions have the ids 3 and 4, in the order of `SUB_LAYERS`.
    """

    computed: list[Computed]
    output: int
    """Id of the output value."""
    entered: list[nn.Module]
    """The modules whose children were recorded, the layer first."""


SUB_LAYERS = get_args(SubLayer)


def record_layer(layer: nn.Module, enter: Callable[[nn.Module], bool], inputs: int) -> Layer:
    """Run the forward method of a layer on stand-ins, and record its computations in order.

    Modules of a copy are replaced by stand-ins, so nothing is computed: the recording needs no
    memory, draws no random numbers, and calls no hooks.

    Args:
        layer: a block, an attention layer or a feed-forward of a class of `nn`.
        enter: returns True for a module whose children are recorded. Its forward method may only
            call modules, add values, and call `Context.by_part` with a method of a module.
        inputs: 3 if the layer takes x, a context and a cache entry; 1 if it only takes x.
    """
    recorder = _Recorder()
    copies: dict[nn.Module, nn.Module] = {}
    copy = copied(layer, copies)
    entered = [layer]
    for module in entered:
        for name, child in module._modules.items():  # also a module that has two names
            if child is None or child in entered:
                continue
            if enter(child):
                entered.append(child)
            else:
                copies[module]._modules[name] = _StandIn(child, recorder)
    entries = {name: object() for name in SUB_LAYERS}
    context = _Context({made: module for module, made in copies.items()}, recorder)
    given = _Value(recorder), context, _Cache(entries), *entries.values()
    for value in given:
        recorder.number(value)
    output = recorder.number(copy.forward(*given[:inputs]))
    recorder.forget()
    return Layer(recorder.computed, output, entered)


class _Value:
    """Takes the place of a tensor in a recording."""

    def __init__(self, recorder: "_Recorder") -> None:
        self._recorder = recorder

    def __add__(self, other: object) -> "_Value":
        output = _Value(self._recorder)
        self._recorder.add(None, (self, other), output)
        return output


class _StandIn(nn.Module):
    """Takes the place of a module in a recording; its outputs have no meaning."""

    def __init__(self, module: nn.Module, recorder: "_Recorder") -> None:
        super().__init__()
        self.recorded = (module,)  # in a tuple, so that it is not a submodule
        self.recorder = recorder

    def forward(self, *inputs: object) -> object:
        (module,) = self.recorded
        assert all(map(self.recorder.knows, inputs))
        output = inputs[0] if is_identity(module) else _Value(self.recorder)
        self.recorder.add(module, inputs, output)
        return output


class _Context(NamedTuple):
    """Takes the place of a `Context` in a recording."""

    originals: dict[nn.Module, nn.Module]
    """The recorded module for each copy."""
    recorder: "_Recorder"

    def by_part(self, method: Any, *xs: object, cache: object) -> _Value:
        """Record a method of a module as one computation."""
        output = _Value(self.recorder)
        module = self.originals[method.__self__]
        self.recorder.add(module, (*xs, self, cache), output, method.__name__)
        return output


class _Cache(NamedTuple):
    """Takes the place of a `CacheEntry` in a recording."""

    inputs: dict[str, object]


class _Recorder(TorchFunctionMode):
    """Records computations: hooks record known modules, and this mode records other functions.

    Each tensor has an id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[Computed] = []
        self.foreign: str | None = None
        self._values: list[object] = []  # kept alive, so that ids of live tensors stay unique
        self._inside = 0
        self._wirings: list[nn.Module] = []
        self._thread = threading.get_ident()  # other threads may call the modules meanwhile

    def number(self, value: object) -> int:
        """Return the id of a value; a new value gets a new id."""
        for n, known in enumerate(self._values):
            if known is value:
                return n
        self._values.append(value)
        return len(self._values) - 1

    def knows(self, value: object) -> bool:
        return any(known is value for known in self._values)

    def forget(self) -> None:
        """Release the values, some of which refer to this object."""
        self._values.clear()

    def begin(self, module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        """Hook before the forward pass of a module that is not recorded as one computation."""
        if threading.get_ident() == self._thread:
            self._wirings.append(module)

    def end(self, _module: nn.Module, _inputs: tuple[Any, ...], _output: Any) -> None:
        """Hook after the forward pass of a module that is not recorded as one computation."""
        if threading.get_ident() == self._thread:
            self._wirings.pop()

    def enter(self, _module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        self._inside += threading.get_ident() == self._thread

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._inside -= 1
        if not self._inside:
            self.add(module, (value for value in inputs if isinstance(value, Tensor)), output)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", repr(func))
        # A property such as `data` is a view, through which the tensor can be changed.
        if self._inside or (name in QUESTIONS and not isinstance(found, Tensor)):
            return found
        values = (*args, *(kwargs or {}).values())
        given = [value for value in values if isinstance(value, Tensor)]
        if func in ADDITIONS and len(given) == len(args) == len(values):
            if all(map(self.knows, given)):
                self.add(None, given, found)
        elif any(self.knows(one) for one in given if one.is_floating_point()):
            self.refuse(name)
        return found

    def refuse(self, what: str) -> None:
        """Note a computation that cannot be translated; only the first one is kept.

        Args:
            what: its name. If a module contains it, the module's class is noted instead.
        """
        wiring = type(self._wirings[-1]).__name__ if self._wirings else ""
        self.foreign = self.foreign or wiring or what

    def add(
        self,
        module: nn.Module | None,
        inputs: Iterable[object],
        output: object,
        method: str = "forward",
    ) -> None:
        """Record a computation; inputs that are not known values are left out."""
        known = tuple(self.number(value) for value in inputs if self.knows(value))
        if not known:
            self.refuse(f"the input of {type(module).__name__}")
        self.computed.append(Computed(module, known, self.number(output), method))
