"""How the threads of an operator wait for each other, which is settled when torch is imported."""

import os
import sys

SPINS = 2000
"""How often a thread looks whether the others have come before it sleeps: for some ten µs.

By itself GNU OpenMP looks 300,000 times, for milliseconds, in which the thread keeps a core from
those that it waits for where other work has the rest.
"""
SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Of the environment; what they say goes first."""


def share_cores() -> None:
    """Let threads that wait sleep soon, so that other work on the machine disturbs them less.

    The command line does this by itself. A program calls it before it first imports torch. It tells
    GNU OpenMP, which PyTorch's builds for Linux bring along.

    Raises:
        RuntimeError: torch is imported already, too late.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already; call share_cores before")
    if not any(name in os.environ for name in SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
