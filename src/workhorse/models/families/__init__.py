"""Families of models as data: presets, how a Hugging Face config is read, names of tensors."""
