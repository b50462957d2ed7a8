"""Training objectives: what training minimises."""
