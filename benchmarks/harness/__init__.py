"""The harness: it runs contestants in turn, measures them, and prints the results."""
