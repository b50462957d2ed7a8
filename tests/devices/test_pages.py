"""Tensors in large pages do not overlap, are aligned, and use no more memory than they need."""

import pytest
import torch

from workhorse.devices.memory import in_large_pages


@pytest.mark.parametrize("rows", [1000, 2000])
def test_apart_and_aligned(rows: int) -> None:
    shapes = [torch.Size(shape) for shape in ((3, 5), (1,), (0, 4), (rows, 1000))]
    tensors = in_large_pages(shapes, torch.bfloat16)
    assert rows < 2000 or tensors[0].data_ptr() % 2**21 == 0
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.data_ptr() % 64 == 0
        assert (tensor == number).all()


def test_what_fills_no_page_takes_no_room_for_one() -> None:
    (small,) = in_large_pages([torch.Size([64, 64])], torch.uint8)
    assert small.untyped_storage().nbytes() == small.nbytes
