"""Run directories: checkpoints that are whole or absent."""
