"""Where a token stands: rotations and slopes inside attention, vectors added to the embedding."""
