"""Devices and dtypes by name, the number of threads, and the cache folder."""

import os
from pathlib import Path

import torch

from workhorse.devices.instructions import cpu_has
from workhorse.errors import WorkhorseError, nearest, shown

DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

MOST_THREADS = 16
"""Maximum number of threads per CPU."""


def resolve_device(name: str | torch.device) -> torch.device:
    """Return the device with this name; `auto` is CUDA if it is available, else the CPU.

    Raises:
        WorkhorseError: the device is not available on this machine.
    """
    if isinstance(name, str) and name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError):  # the last: a number beyond PyTorch's
        raise WorkhorseError(
            f"device={_as_given(name)} is not a device; choose cpu, cuda, cuda:N or mps"
        ) from None
    there = {
        "cpu": device.index in (None, 0),
        "cuda": (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(device.type, False):
        raise WorkhorseError(f"device={_as_given(name)} is not available; use cpu or auto")
    return device


def _as_given(name: object) -> str:
    """Format a device name for a message in one line; a string is printed without quotes."""
    return name if isinstance(name, str) and name.isprintable() else shown(name)


def resolve_dtype(name: str | torch.dtype) -> torch.dtype | None:
    """Return the floating-point dtype with this name; None for `auto`.

    Raises:
        WorkhorseError: there is no such dtype.
    """
    if isinstance(name, torch.dtype):
        name = dtype_name(name)
    if not isinstance(name, str) or name not in DTYPES:
        raise WorkhorseError(f"dtype {shown(name)} is unknown; {nearest(str(name), DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in recipes and on the command line, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def use_threads(count: int) -> None:
    """Set the number of threads that PyTorch uses for computation.

    Raises:
        WorkhorseError: the count is more than `MOST_THREADS` per CPU: threads would only wait for
            each other, or could not be created.
    """
    cpus = os.cpu_count() or 1
    if count > MOST_THREADS * cpus:
        raise WorkhorseError(
            f"threads={count} is more than {MOST_THREADS} for each of this machine's {cpus} CPUs; "
            "choose fewer, or 0 for PyTorch's own choice"
        )
    torch.set_num_threads(count)


def name_of(device: torch.device) -> str:
    """Return the product name of a GPU; for other devices, the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def training_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype in which training computes.

    `auto` is bfloat16 if the device has instructions for bfloat16 matmuls, else float32.
    """
    if name == "auto":
        return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32
    return getattr(torch, name)


def multiplies_bfloat16(device: torch.device) -> bool:
    """True if the device has instructions for bfloat16 matmuls.

    The meta device is treated as a GPU that has them (see `devices.tape.stand_in`).
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "meta":
        return True
    return device.type == "cpu" and (cpu_has("avx512_bf16") or cpu_has("amx_bf16"))


def cache_folder() -> Path:
    """Return the cache folder for programs that were compiled for this machine.

    Raises:
        WorkhorseError: the account has no home directory, and XDG_CACHE_HOME is not set.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "workhorse"
    home = Path(os.path.expanduser("~"))  # stays `~` in an account without a home
    if not (
        home.is_absolute() and os.environ.get("HOME", "unset")
    ):  # never use a folder that others can write to: its programs are executed
        raise WorkhorseError(
            "this account has no home directory to keep compiled programs in; set XDG_CACHE_HOME"
        )
    return home / ".cache" / "workhorse"
