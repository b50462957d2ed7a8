"""Recipes: their keys, validation, and overrides from the command line."""
