"""Modules and autograd functions that train on a CPU with native operators."""
