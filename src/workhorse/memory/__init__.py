"""The memory that training, loading and caches need, found before it is taken."""
