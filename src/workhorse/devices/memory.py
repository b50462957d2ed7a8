"""How much memory this process has and can still take, and memory in large pages.

If Linux gives large pages on request (its setting of transparent huge pages is `madvise`), reading
weights of width 768 ran at 40 GB/s instead of 28, of width 2048 at 40 instead of 35, on two cores
of an Intel Xeon.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError

_PAGE = 2**21  # bytes
_LINE = 64
_WANTS_LARGE_PAGES = 14  # MADV_HUGEPAGE of <sys/mman.h>, on Linux


def in_large_pages(shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[Tensor]:
    """Empty contiguous tensors on the CPU, one after the other, in large pages if they fill one.

    Memory is used only as they are filled, so moving tensors here one by one needs room for one.
    """
    steps = [-(-shape.numel() * dtype.itemsize // _LINE) * _LINE for shape in shapes]
    large = sum(steps) >= _PAGE
    room = torch.empty(sum(steps) + large * _PAGE, dtype=torch.uint8)
    start = 0
    if large and room.untyped_storage().device == room.device:  # one without data has no address
        start = -room.data_ptr() % _PAGE
        _ask(room.data_ptr() + start, room.numel() - start)
    pieces = room[start : start + sum(steps)].split(steps)
    return [
        piece[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for piece, shape in zip(pieces, shapes, strict=True)
    ]


def _ask(address: int, size: int) -> None:
    """Request large pages; a system that does not know the request ignores it."""
    try:
        advise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):  # not a Unix
        return
    advise(ctypes.c_void_p(address), ctypes.c_size_t(size // _PAGE * _PAGE), _WANTS_LARGE_PAGES)


ROOT = Path("/")
MIB, GIB = 2**20, 2**30
STATUS, CLEAR = ROOT / "proc/self/status", ROOT / "proc/self/clear_refs"


def check_fits(
    n_bytes: int, device: torch.device, what: str, remedy: str, root: Path = ROOT
) -> None:
    """Refuse what a device has no memory for, where the system would end the process.

    Where the system does not say how much there is, nothing is refused.

    Args:
        n_bytes: the least that will be needed.
        device: where.
        what: begins the message: "llama-7b needs 25.1 GiB …".
        remedy: ends it.
        root: see `free_memory`.

    Raises:
        WorkhorseError: there are fewer, swap included.
    """
    free = available(device, root)
    if free is not None and n_bytes > free:
        raise WorkhorseError(
            f"{what} needs {size(n_bytes)} and {size(free)} are free on {device.type}; {remedy}"
        )


def size(n_bytes: float) -> str:
    """A number of bytes for people: 512.0 MiB, 13.4 GiB."""
    return f"{n_bytes / GIB:,.1f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.1f} MiB"


def available(device: torch.device, root: Path = ROOT) -> int | None:
    """Bytes that a device has left, swap included; None where the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return free_memory(root, swap=True) if device.type == "cpu" else None


def free_memory(root: Path = ROOT, *, swap: bool = False) -> int | None:
    """Bytes that the machine has left, or that are left of a limit on this process's group.

    None where the system does not say (it is not Linux).

    Args:
        root: below which `/proc` and `/sys` are.
        swap: count the machine's free swap too.
    """
    meminfo = root / "proc/meminfo"
    free = _field(meminfo, "MemAvailable:")
    if free is None:
        return None
    free += (_field(meminfo, "SwapFree:") or 0) if swap else 0
    return max(0, min([free * 1024, *_left_of_limits(root)]))


def resident() -> int:
    """Bytes of this process in memory now; also resets the peak that `most_resident` gives."""
    with contextlib.suppress(OSError):  # where forbidden, the peak stays the process's
        CLEAR.write_text("5", encoding="utf-8")
    return _kib(STATUS, "VmRSS:")


def most_resident() -> int:
    """Bytes of this process in memory at most since `resident` was called."""
    return _kib(STATUS, "VmHWM:")


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has taken of a device at most; of a CPU all that it holds."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return most_resident()


def _kib(file: Path, name: str) -> int:
    return 1024 * (_field(file, name) or 0)


def _left_of_limits(root: Path) -> Iterator[int]:
    """Of each control group this process is in, inner ones first, version 2 and version 1."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            old = controllers == "memory"
            top = root / ("sys/fs/cgroup/memory" if old else "sys/fs/cgroup")
            names = ("limit_in_bytes", "usage_in_bytes") if old else ("max", "current")
            inner = top / path.lstrip("/")
            # In a container the path may be the host's, and what is mounted is the group itself.
            for folder in [top, *(p for p in [inner, *inner.parents] if p.is_relative_to(top))]:
                yield from _left_of(folder, *names)


def _left_of(folder: Path, limit: str, usage: str) -> Iterator[int]:
    values = [_number(folder / f"memory.{name}") for name in (limit, usage)]
    if values[0] is not None and values[1] is not None:
        # Files read long ago are dropped when memory is wanted.
        cached = _field(folder / "memory.stat", "inactive_file") or 0
        yield values[0] - values[1] + cached


def _number(file: Path) -> int | None:
    """The number in a file; None where there is none: no file, or the word `max`."""
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _field(file: Path, name: str) -> int | None:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
