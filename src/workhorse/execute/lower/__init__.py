"""Forms of a model for native operators, derived from a recording of its modules."""
