"""Decoding steps compiled by PyTorch, or captured as CUDA graphs."""
