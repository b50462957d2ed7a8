"""Training of tokenizers on a stream of texts."""
