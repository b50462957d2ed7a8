"""A whole decoding step in one call, as a program of a native operator."""
