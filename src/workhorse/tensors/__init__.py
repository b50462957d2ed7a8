"""Tensors outside any model: their files, and their memory."""
