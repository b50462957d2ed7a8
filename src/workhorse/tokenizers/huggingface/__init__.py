"""Tokenizers of other people, read from the files that transformers reads."""
