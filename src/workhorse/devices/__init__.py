"""The machine: names of devices and dtypes, CPU instructions, memory, and copies of tensors."""
