"""Ways to execute a model: unchanged PyTorch modules, native operators, compiled programs."""
