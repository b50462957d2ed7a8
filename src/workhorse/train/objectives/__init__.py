"""Training objectives: the losses that training minimises."""
