"""The documentation site: `python -m website.build` writes it (see ARCHITECTURE.md)."""
