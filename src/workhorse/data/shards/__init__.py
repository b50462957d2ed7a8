"""Documents made into memory-mapped tokens, once."""
