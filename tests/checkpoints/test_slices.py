"""Files of tensors that are written row by row, beside the safetensors library."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workhorse.tensors.slices import Slice, fill, lay_out, whole

TENSORS = {
    "wide": torch.randn(7, 3, dtype=torch.float64),
    "weight": torch.randn(5, 4, 2),
    "half": torch.randn(5, 3).bfloat16(),
    "turned": torch.randn(4, 6).T,
    "count": torch.tensor(3),
    "none": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
}


def rows_of(process: int, processes: int) -> dict[str, Slice]:
    """As many rows of each for all processes but the last; what has no rows is the first's."""
    slices: dict[str, Slice] = {}
    for name, tensor in TENSORS.items():
        each = -(-len(tensor) // processes) if tensor.ndim else 1
        first = min(process * each, len(tensor) if tensor.ndim else 1)
        rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
        slices[name] = Slice(rows[first : first + each], first, tuple(tensor.shape))
    return slices


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_rows_in_any_order_make_the_file_of_one_writer(tmp_path: Path, processes: int) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    lay_out(alone, whole(TENSORS))
    fill(alone, whole(TENSORS))
    lay_out(together, rows_of(0, processes))
    for process in reversed(range(processes)):
        fill(together, rows_of(process, processes))
    assert together.read_bytes() == alone.read_bytes()
    read = load_file(together)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(mine)
    lay_out(link, whole(TENSORS))
    assert mine.read_text() == "mine"
    assert not link.is_symlink()
