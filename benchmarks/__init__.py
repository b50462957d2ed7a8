"""Benchmarks of Workhorse against its peers; README.md lists them."""
