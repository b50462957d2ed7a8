"""Devices of this machine: their names, dtypes, CPU instructions, memory, and tensor copies."""
