"""One training step: loss, gradient, update."""
