"""What the environment says of the processes of a run; `torchrun` and `launch` write it."""

import os


def count() -> int:
    """How many processes there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this one, from 0."""
    return int(os.environ.get("RANK", "0"))


def rank_here() -> int:
    """The number of this one among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def count_here() -> int:
    """How many of them share this machine's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def attempt() -> int:
    """How often processes of this machine before these have failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
