"""Configs: frozen, strict about keys, read from YAML and JSON; their errors and overrides."""
