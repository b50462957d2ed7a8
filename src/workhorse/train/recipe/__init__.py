"""Recipes: what one may say, read from YAML and from the command line, and refused in words."""
