"""Ctrl-C held back while what must agree is being changed, and let through while work goes on."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Held:
    """A handler of SIGINT that notes it, or lets it through."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before = before
        self.noted = False
        self.lets_through = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.lets_through:
            self.before(number, frame)
        else:
            self.noted = True

    def deliver(self) -> None:
        """Call the handler from before if an interrupt was noted."""
        if self.noted:
            self.noted = False
            self.before(signal.SIGINT, None)


@contextmanager
def interrupts_held() -> Generator[None]:
    """Hold SIGINT back until the end of the block, or until `interrupts_let_through`.

    Only in the main thread, the only one that Python interrupts, and if a Python function handles
    the signal, as by default.
    """
    before = signal.getsignal(signal.SIGINT)
    if not _interruptible() or not callable(before) or isinstance(before, _Held):
        yield
        return
    held = _Held(before)
    signal.signal(signal.SIGINT, held)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        held.deliver()


@contextmanager
def interrupts_let_through() -> Generator[None]:
    """Within `interrupts_held`: let SIGINT act at once, one that was held back too."""
    held = signal.getsignal(signal.SIGINT)
    if not _interruptible() or not isinstance(held, _Held) or held.lets_through:
        yield
        return
    held.lets_through = True
    try:
        held.deliver()
        yield
    finally:
        held.lets_through = False


def _interruptible() -> bool:
    return threading.current_thread() is threading.main_thread()
