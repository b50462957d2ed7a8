"""Programs of PyTorch's compiler, for decoding steps."""
