"""What a decoder computes, module by module, recorded while it reads one token.

So the wiring of a model is stated once, in `nn`: a program of its steps follows what its forward
pass does.
"""

import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workhorse.nn import Decoder

ADDITIONS = (torch.add, Tensor.add, Tensor.__add__)


class CannotTranslate(Exception):
    """A decoder computes something that no instruction covers."""


class Computed(NamedTuple):
    """One computation: a module's, or a sum.

    Attributes:
        module: that computed it; None: it is the sum of the inputs.
        inputs: numbers of the values that it was given.
        output: number of the value that it gave; that of an input if it gave that back.
    """

    module: nn.Module | None
    inputs: tuple[int, ...]
    output: int


def record_modules(decoder: Decoder, known: Callable[[nn.Module], bool]) -> list[Computed]:
    """What modules that are known, and sums, compute of a token in turn; value 0 is the token.

    Args:
        decoder: to run once.
        known: whether a module is to be recorded; of any other its children are.

    Raises:
        CannotTranslate: anything else happens between token and logits.
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
        recorder.foreign = "what follows the last module"
    if recorder.foreign is not None:
        raise CannotTranslate(recorder.foreign)
    return recorder.computed


class _Recorder(TorchFunctionMode):
    """Knows values by the tensors that hold them, and sees every function outside of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[Computed] = []
        self.foreign: str | None = None
        self._values: list[Tensor] = []  # alive, so that no two have one address
        self._inside = 0
        self._wirings: list[nn.Module] = []
        self._thread = threading.get_ident()  # others may call the modules meanwhile

    def number(self, value: Tensor) -> int:
        """The number of a value, a new one for a tensor that was not seen before."""
        for n, known in enumerate(self._values):
            if known is value:
                return n
        self._values.append(value)
        return len(self._values) - 1

    def knows(self, value: Tensor) -> bool:
        return any(known is value for known in self._values)

    def begin(self, module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        """A module begins that is not recorded itself."""
        if threading.get_ident() == self._thread:
            self._wirings.append(module)

    def end(self, _module: nn.Module, _inputs: tuple[Any, ...], _output: Any) -> None:
        """It ends."""
        if threading.get_ident() == self._thread:
            self._wirings.pop()

    def enter(self, _module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        self._inside += threading.get_ident() == self._thread

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._inside -= 1
        if not self._inside:
            self._add(module, (value for value in inputs if isinstance(value, Tensor)), output)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self._inside and isinstance(found, Tensor):
            given = [value for value in args if isinstance(value, Tensor)]
            if func in ADDITIONS and len(given) == len(args) and all(map(self.knows, given)):
                self._add(None, given, found)
            elif found.is_floating_point() and any(map(self.knows, given)):
                self.refuse(getattr(func, "__name__", repr(func)))
        return found

    def refuse(self, what: str) -> None:
        """Keep the first thing that cannot be translated: its module, or what it is."""
        wiring = type(self._wirings[-1]).__name__ if self._wirings else ""
        self.foreign = self.foreign or wiring or what

    def _add(self, module: nn.Module | None, inputs: Iterable[Tensor], output: Tensor) -> None:
        known = tuple(self.number(value) for value in inputs if self.knows(value))
        if not known:
            self.refuse(f"the input of {type(module).__name__}")
        self.computed.append(Computed(module, known, self.number(output)))
