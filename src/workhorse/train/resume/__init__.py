"""Resuming a run."""
