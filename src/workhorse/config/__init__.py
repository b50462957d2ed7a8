"""Configs: frozen, strict about keys, read from YAML and JSON; errors and overrides."""
