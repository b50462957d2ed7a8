"""Positions: rotations and linear biases inside attention, vectors added to the embedding."""
