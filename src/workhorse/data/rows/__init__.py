"""Tokens cut into the rows of batches, each a pure function of the seed and the step."""
