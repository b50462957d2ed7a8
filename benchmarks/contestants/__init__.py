"""What is measured: our own work, the machine's limits, and what several benchmarks share."""
