"""Mixtures of experts: the router, and the experts' computation."""
