"""Memory that is read faster: pages of 2 MiB, of which the CPU must look up fewer.

Where Linux gives large pages to those who ask (`madvise` in its setting of transparent huge pages),
a stream through weights of width 768 ran at 40 GB/s rather than 28, of width 2048 at 40 rather than
35, on two cores of an Intel Xeon.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

_PAGE = 2**21  # bytes
_LINE = 64
_WANTS_LARGE_PAGES = 14  # MADV_HUGEPAGE of <sys/mman.h>, on Linux


def in_large_pages(shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[Tensor]:
    """Empty tensors on the CPU one behind the other, in large pages if the system has them.

    Memory is taken as they are filled: moving tensors here one by one needs room for one more.
    """
    steps = [-(-shape.numel() * dtype.itemsize // _LINE) * _LINE for shape in shapes]
    room = torch.empty(sum(steps) + _PAGE, dtype=torch.uint8)
    start = -room.data_ptr() % _PAGE
    _ask(room.data_ptr() + start, room.numel() - start)
    pieces = room[start : start + sum(steps)].split(steps)
    return [
        piece[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for piece, shape in zip(pieces, shapes, strict=True)
    ]


def _ask(address: int, size: int) -> None:
    """A system that does not know the request refuses it, and nothing is lost."""
    try:
        advise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):  # not a Unix
        return
    advise(ctypes.c_void_p(address), ctypes.c_size_t(size // _PAGE * _PAGE), _WANTS_LARGE_PAGES)
