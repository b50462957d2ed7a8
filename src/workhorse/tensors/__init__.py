"""Tensors outside any model: files of them, and the memory they lie in."""
