"""Loaded models, and operations on models: load, save, convert, describe."""
