"""Measurements of Workhorse beside its peers; README.md lists those that run."""
