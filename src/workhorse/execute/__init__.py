"""Ways to execute a model: PyTorch's modules as they stand, native operators, compiled programs."""
