"""Memory that training, loading and caches will need, from runs without data; refusing what does not fit."""
