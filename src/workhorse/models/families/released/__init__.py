"""Presets read from the `config.json` of published models, one file per family."""
