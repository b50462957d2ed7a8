"""What a name of a device or a number format stands for on this machine, and where its cache is."""

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
"""For each CPU."""


def resolve_device(name: str | torch.device) -> torch.device:
    """The device, or the one of that name; `auto` is CUDA where there is one and else the CPU.

    Raises:
        WorkhorseError: there is no such device here.
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
        raise WorkhorseError(f"device={_as_given(name)} is not there; choose cpu, or auto")
    return device


def _as_given(name: object) -> str:
    """In one line: without quotes where it is a word, as on the command line."""
    return name if isinstance(name, str) and name.isprintable() else shown(name)


def resolve_dtype(name: str | torch.dtype) -> torch.dtype | None:
    """The floating-point type, or the one of that name; None for `auto`.

    Raises:
        WorkhorseError: there is no such type.
    """
    if isinstance(name, torch.dtype):
        name = dtype_name(name)
    if not isinstance(name, str) or name not in DTYPES:
        raise WorkhorseError(f"dtype {shown(name)} is unknown; {nearest(str(name), DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """As it is written in recipes and on the command line: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def use_threads(count: int) -> None:
    """Let PyTorch compute with so many threads.

    Raises:
        WorkhorseError: so many would only wait for each other, or could not be made.
    """
    cpus = os.cpu_count() or 1
    if count > MOST_THREADS * cpus:
        raise WorkhorseError(
            f"threads={count} is more than {MOST_THREADS} for each of this machine's {cpus} CPUs; "
            "choose fewer, or 0 for PyTorch's own choice"
        )
    torch.set_num_threads(count)


def name_of(device: torch.device) -> str:
    """The GPU's name, or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def training_dtype(name: str, device: torch.device) -> torch.dtype:
    """The format of the arithmetic; `auto` is bfloat16 if it has instructions here, else float32.

    Args:
        name: `auto`, `float32`, `bfloat16` or `float16`.
        device: where the arithmetic is done.
    """
    if name == "auto":
        return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32
    return getattr(torch, name)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products of bfloat16 matrices.

    The meta device stands in for a GPU that has them (see `tensors.tape.stand_in`).
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "meta":
        return True
    return device.type == "cpu" and (cpu_has("avx512_bf16") or cpu_has("amx_bf16"))


def cache_folder() -> Path:
    """Where is kept what was made for this machine and can be made again: compiled programs.

    Raises:
        WorkhorseError: the account has no home directory, and XDG_CACHE_HOME is not set.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "workhorse"
    home = Path(os.path.expanduser("~"))  # stays `~` in an account without
    if not (
        home.is_absolute() and os.environ.get("HOME", "unset")
    ):  # a folder that everybody writes to might hold others' programs
        raise WorkhorseError(
            "this account has no home directory to keep compiled programs in; set XDG_CACHE_HOME"
        )
    return home / ".cache" / "workhorse"
