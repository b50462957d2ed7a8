"""An orderly stop: a first SIGINT, SIGTERM or SIGHUP requests it, a second one acts at once."""

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, Self

STOPPING = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")]
"""Windows has no SIGHUP."""


class StopSignals:
    """A context that records the first SIGINT, SIGTERM or SIGHUP instead of ending the process.

    SIGHUP means that the terminal is gone; it stays ignored under `nohup`. The first signal
    restores the former handlers, so a second one acts at once. Outside the main thread, where
    Python delivers no signals, none is recorded. The context may be entered again inside itself.

    Args:
        numbers: the signals to record.

    Attributes:
        received: the first of them, also after the context.
    """

    def __init__(self, numbers: Sequence[signal.Signals] = STOPPING) -> None:
        self.received: signal.Signals | None = None
        self._numbers = numbers
        self._depth = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if number.name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()
