"""Published models whose presets are what their `config.json` says, one file per family."""
