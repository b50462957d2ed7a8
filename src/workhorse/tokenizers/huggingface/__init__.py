"""Reads tokenizers from the files of Hugging Face transformers."""
