"""Entry point of `python -m workhorse` and of the console script `workhorse`."""

import os
import signal


def run() -> None:
    """Run the command. Ctrl-C during its imports ends it silently, with exit code 130."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from workhorse.cli import main

    signal.signal(signal.SIGINT, handler)
    try:
        main.run()
    except KeyboardInterrupt:  # raised before `main` handles it
        os._exit(130)


if __name__ == "__main__":
    run()
