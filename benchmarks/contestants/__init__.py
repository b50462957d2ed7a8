"""Measured work: Workhorse itself, the machine's limits, and code that benchmarks share."""
