"""Tensors in large pages are tensors like others."""

import torch

from workhorse.tensors.pages import in_large_pages


def test_apart_and_aligned() -> None:
    shapes = [torch.Size(shape) for shape in ((3, 5), (1,), (0, 4), (1000, 1000))]
    tensors = in_large_pages(shapes, torch.bfloat16)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.data_ptr() % 64 == 0
        assert (tensor == number).all()
