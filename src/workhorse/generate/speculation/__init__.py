"""Tokens guessed cheaply, which one pass of the model checks."""
