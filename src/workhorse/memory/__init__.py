"""Estimates of the memory of training, loading and caches, before anything is allocated."""
