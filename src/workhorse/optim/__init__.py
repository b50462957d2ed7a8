"""Optimizers: what updates which parameter, in which precision, at which learning rate."""
