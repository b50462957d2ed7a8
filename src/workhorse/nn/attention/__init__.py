"""Attention: grouped heads, latent keys and values, what may be seen, and the kernels."""
