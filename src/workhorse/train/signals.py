"""An orderly stop: a first SIGINT, SIGTERM or SIGHUP requests it, a second one acts at once."""

import signal
import threading
from types import FrameType
from typing import Any, Self

STOPPING = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")]
"""Windows has no SIGHUP."""


class StopSignals:
    """A context that records the first SIGINT, SIGTERM or SIGHUP instead of ending the process.

    SIGHUP means that the terminal is gone; it stays ignored under `nohup`. The first signal
    restores the former handlers, so a second one acts at once. Outside the main thread, where
    Python delivers no signals, none is recorded.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if number.name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self.__exit__()
