"""Environment variables that describe the processes of a run; `torchrun` and `launch` set them."""

import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

from workhorse.errors import WorkhorseError, shown


def count() -> int:
    """Number of processes of the run (`WORLD_SIZE`).

    Raises:
        WorkhorseError: `WORLD_SIZE` is 0, or `RANK` is not less than it.
    """
    size = _number("WORLD_SIZE", 1)
    if rank() >= size:
        raise WorkhorseError(
            f"RANK={rank()} in the environment is not less than WORLD_SIZE={size}; start with "
            "torchrun, which sets both, or unset them"
        )
    return size


def check_address(patience: float = 10.0) -> None:
    """Check that the address of rank 0 can be resolved; otherwise PyTorch would wait for minutes.

    Args:
        patience: seconds to retry. A cluster may publish the name of a new machine late.

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
                    "set it to the address of the machine of rank 0"
                ) from None
        time.sleep(1)


def check_loopback(patience: float = 5.0) -> None:
    """Check that processes on this machine can reach each other through `localhost`.

    Raises:
        WorkhorseError: they cannot, for example in a container without any network.
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
    """The command-line arguments that start `WORLD_SIZE` processes on one machine; empty for 1."""
    return ["--workers", str(count())] if count() > 1 else []


def rank() -> int:
    """The rank of this process (`RANK`)."""
    return _number("RANK", 0)


def rank_here() -> int:
    """The rank of this process on its machine (`LOCAL_RANK`)."""
    return _number("LOCAL_RANK", 0)


def count_here(planned: int = 1) -> int:
    """Number of processes on this machine (`LOCAL_WORLD_SIZE`); `planned` if that is not set."""
    return _number("LOCAL_WORLD_SIZE", planned)


def attempt() -> int:
    """Number of restarts by PyTorch's elastic agent (`TORCHELASTIC_RESTART_COUNT`)."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def agent_began() -> float:
    """Start time of the elastic agent (the parent process), in seconds since the epoch.

    0 if the system does not report the time.
    """
    try:
        agent = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8")
        booted = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(encoding="utf-8"), re.M)
    except OSError:
        return 0.0
    if booted is None:
        return 0.0
    ticks = int(agent.rpartition(")")[2].split()[19])  # field 22: start time in ticks after boot
    return int(booted[1]) + ticks / os.sysconf("SC_CLK_TCK")


def end_with_agent() -> None:
    """Start a thread that sends SIGTERM to this process when its elastic agent exits.

    The process then saves a checkpoint. Without an agent, do nothing.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="workhorse: agent", daemon=True).start()


def _number(name: str, otherwise: int) -> int:
    """Integer value of an environment variable; `otherwise` if it is not set."""
    value = os.environ.get(name, str(otherwise))
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise WorkhorseError(
            f"{name}={shown(value)} in the environment is not a number; start with torchrun, which "
            "sets it, or unset it"
        )
    return int(value)
