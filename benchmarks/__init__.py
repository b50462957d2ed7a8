"""Measurements of Workhorse beside its peers; each module runs by itself, see RESULTS.md."""
