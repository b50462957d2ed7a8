"""The machine: names of devices and dtypes, its instructions and memory, tensors on it."""
