"""Programs of PyTorch's compiler: of a decoding step, and of layers in training."""
