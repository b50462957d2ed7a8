"""Documents encoded once into memory-mapped tokens."""
