"""Attention: grouped heads, latent keys and values, masks, and kernels."""
