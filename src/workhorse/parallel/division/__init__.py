"""What processes divide: weights, layers, sequences, experts, and who has which part."""
