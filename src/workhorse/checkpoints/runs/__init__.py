"""Run directories and their checkpoints, which are written atomically."""
