"""What to measure on a GPU, in eight blocks of less than ten minutes each; see `__main__`."""
