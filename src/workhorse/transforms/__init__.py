"""Transforms of a built model: quantised weights, float8 matmuls, fewer key-value heads."""
