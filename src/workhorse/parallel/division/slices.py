"""What each process writes of the tensors of a model that processes divide."""

from collections.abc import Mapping

import torch
from torch import Tensor

from workhorse.files.slices import Slice
from workhorse.optim.shards import is_sharded
from workhorse.parallel.division.cuts import ModelPart


def own_slices(
    tensors: Mapping[str, Tensor], rank: int, part: ModelPart | None
) -> dict[str, Slice]:
    """The part of each tensor that a process has to write, so that all together write all.

    What several processes have, the first of them writes; the others' slices are empty.

    Args:
        tensors: by name, parameters or what an optimizer keeps of them.
        rank: of the process.
        part: of the model that it has; None: all layers are whole.

    Returns:
        By their names in the whole model.
    """
    slices: dict[str, Slice] = {}
    if part is not None:
        for name, (shape, dtype) in part.beside(tensors).items():
            slices[name] = Slice(torch.empty(0, dtype=dtype), (0,) * len(shape), tuple(shape))
    for name, tensor in tensors.items():
        whole, shape = name, tensor.shape
        starts = (0,) * tensor.ndim
        first_of_all, writes = 0, True
        if part is not None:
            cut = part.cut(name, tensor)
            whole, shape, starts = cut.name, cut.shape, cut.starts
            first_of_all = part.first
            writes = part.member % part.copies(cut) == 0 and not cut.again
        values = tensor.detach()
        if is_sharded(values):
            first, has_first = _place(values, rank, first_of_all)
            starts = (starts[0] + first, *starts[1:])
            writes &= has_first
            values = values.to_local()
        else:
            writes &= rank == first_of_all
        slices[whole] = Slice(values if writes else values.reshape(-1)[:0], starts, tuple(shape))
    return slices


def _place(tensor: Tensor, rank: int, first_of_all: int) -> tuple[int, bool]:
    """The first row that a process has of a sharded tensor, and whether it is the first with it.

    Args:
        tensor: sharded by rows.
        rank: of the process.
        first_of_all: the number of the first process with the same part of the model.
    """
    assert is_sharded(tensor)
    ranks = tensor.device_mesh.mesh
    copies = ranks.view(-1, ranks.shape[-1])  # each has all rows
    number = int((copies == rank).nonzero()[0, 1])
    rows = len(tensor)
    first = min(number * -(-rows // len(copies[0])), rows)
    return first, rank in copies[0] and first_of_all in copies[0]
