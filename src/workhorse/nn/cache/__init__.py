"""Keys and values of earlier tokens."""
