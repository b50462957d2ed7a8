"""Changes to a built model from outside: its code knows nothing of them."""
