"""A loaded model, and what is done with models: load, save, convert, describe."""
