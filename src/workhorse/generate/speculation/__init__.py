"""Speculative decoding: tokens are guessed cheaply, and verified in one pass of the model."""
