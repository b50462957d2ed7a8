"""File access: atomic writes, and reading of untrusted files within limits."""
