"""What the environment says of the processes of a run; `torchrun` and `launch` write it."""

import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

from workhorse.errors import WorkhorseError, shown


def count() -> int:
    """How many processes there are.

    Raises:
        WorkhorseError: there is none, or this is none of them.
    """
    size = _number("WORLD_SIZE", 1)
    if rank() >= size:
        raise WorkhorseError(
            f"RANK={rank()} in the environment is not below WORLD_SIZE={size}; torchrun sets both, "
            "or unset them"
        )
    return size


def check_address(patience: float = 10.0) -> None:
    """Refuse an address of the first process that has no meaning here; PyTorch waits for minutes.

    Args:
        patience: seconds for a name that is about to be published, as of a cluster's new machine.

    Raises:
        WorkhorseError: the name cannot be resolved.
    """
    name = os.environ.get("MASTER_ADDR", "localhost")
    end = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= end:
                raise WorkhorseError(
                    f"MASTER_ADDR={shown(name)} in the environment cannot be resolved ({error}); "
                    "give the address of the machine of the first process"
                ) from None
        time.sleep(1)


def check_loopback(patience: float = 5.0) -> None:
    """Check that processes of this machine reach each other.

    Raises:
        WorkhorseError: they do not, as where a container has no network at all.
    """
    try:
        with socket.create_server(("localhost", 0)) as server:
            socket.create_connection(server.getsockname()[:2], patience).close()
    except OSError as error:
        raise WorkhorseError(
            f"processes on this machine cannot reach each other at localhost ({error}); enable the "
            "loopback interface (ip link set lo up), or train with one process"
        ) from None


def workers() -> list[str]:
    """The command-line arguments that start this many processes on one machine; none for one."""
    return ["--workers", str(count())] if count() > 1 else []


def rank() -> int:
    """The number of this one, from 0."""
    return _number("RANK", 0)


def rank_here() -> int:
    """The number of this one among those of its machine."""
    return _number("LOCAL_RANK", 0)


def count_here(planned: int = 1) -> int:
    """How many share this machine's memory; before they are started, as many as planned."""
    return _number("LOCAL_WORLD_SIZE", planned)


def attempt() -> int:
    """How often this machine's processes have been started again."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def agent_began() -> float:
    """When the process began that starts this one again, in seconds since the epoch.

    0 where the system does not tell.
    """
    try:
        agent = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8")
        booted = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(encoding="utf-8"), re.M)
    except OSError:
        return 0.0
    if booted is None:
        return 0.0
    ticks = int(agent.rpartition(")")[2].split()[19])  # field 22: since the machine was booted
    return int(booted[1]) + ticks / os.sysconf("SC_CLK_TCK")


def end_with_agent() -> None:
    """End this process by SIGTERM, so that it saves, soon after its agent, if any, has gone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="workhorse: agent", daemon=True).start()


def _number(name: str, otherwise: int) -> int:
    """A variable's value.

    Raises:
        WorkhorseError: it is not a number of at most nine digits.
    """
    value = os.environ.get(name, str(otherwise))
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise WorkhorseError(
            f"{name}={shown(value)} in the environment is no number; torchrun sets it, or unset it"
        )
    return int(value)
