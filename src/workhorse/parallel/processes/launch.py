"""Launch several processes on this machine with PyTorch's elastic agent."""

import logging
import os
import sys
from collections.abc import Sequence
from signal import Signals

from workhorse.parallel.processes import environment

TIME_TO_SAVE = 600
"""Seconds that workers have to save and exit after a signal."""


def launch(arguments: Sequence[str], workers: int, restarts: int = 0) -> int:
    """Run `workhorse` with these arguments in several processes, and wait for them.

    If one fails, the agent stops the others and restarts all. A signal to this process is forwarded
    to all workers and ends them. Each worker gets an equal share of the CPU's threads, unless
    `OMP_NUM_THREADS` is set.

    Args:
        arguments: the command-line arguments, without the program name.
        workers: number of processes.
        restarts: maximum number of restarts.

    Returns:
        The exit code of the first worker that failed in the last attempt, or 0.

    Raises:
        WorkhorseError: processes on this machine cannot reach each other.
    """
    environment.check_loopback()
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.Logger.manager.loggerDict):  # the workers report errors themselves
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(TIME_TO_SAVE))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id="workhorse",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # the machine's host name may not resolve
        max_restarts=restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "workhorse", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        ended_by = Signals(-failure.exitcode)
        why = ", probably because memory ran out" if ended_by is Signals.SIGKILL else ""
        print(
            f"workhorse: worker {rank} was killed by {ended_by.name}{why}; run the same command "
            "with --resume to continue from the last checkpoint",
            file=sys.stderr,
        )
        return 128 + ended_by
    except SignalException as error:
        return 128 + error.sigval
    return 0
