"""Recipes: their keys, read from YAML and from the command line, and refused with a reason."""
