"""KV caches: keys and values of earlier tokens."""
