"""Files of tensors that are written in parts, compared with the safetensors library."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workhorse.files.safetensors import Slice, fill, lay_out, whole

TENSORS = {
    "wide": torch.randn(7, 3, dtype=torch.float64),
    "weight": torch.randn(5, 4, 2),
    "half": torch.randn(5, 3).bfloat16(),
    "turned": torch.randn(4, 6).T,
    "count": torch.tensor(3),
    "none": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
}


def part_of(tensor: torch.Tensor, places: tuple[int, ...], ways: tuple[int, ...]) -> Slice:
    """One part of a tensor, which is split into `ways` parts per axis; the last may be smaller."""
    starts: list[int] = []
    values = tensor
    for axis, size in enumerate(tensor.shape):
        each = -(-size // ways[axis])
        starts.append(min(places[axis] * each, size))
        values = values.narrow(axis, starts[-1], min(each, size - starts[-1]))
    if any(places[tensor.ndim :]):  # another part already contains the whole tensor
        return Slice(tensor.reshape(-1)[:0], tuple(starts), tuple(tensor.shape))
    return Slice(values, tuple(starts), tuple(tensor.shape))


@pytest.mark.parametrize("ways", [(1, 1, 1), (2, 1, 1), (8, 1, 1), (1, 2, 1), (3, 1, 2), (2, 3, 2)])
def test_parts_in_any_order_make_the_file_of_one_writer(
    tmp_path: Path, ways: tuple[int, int, int]
) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    lay_out(alone, whole(TENSORS))
    fill(alone, whole(TENSORS))
    parts = [
        {name: part_of(tensor, places, ways) for name, tensor in TENSORS.items()}
        for places in itertools.product(*map(range, ways))
    ]
    lay_out(together, parts[0])
    for part in reversed(parts):
        fill(together, part)
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
