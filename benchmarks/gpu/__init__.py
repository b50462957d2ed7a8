"""GPU measurements in eight blocks of less than ten minutes each; see `__main__`."""
