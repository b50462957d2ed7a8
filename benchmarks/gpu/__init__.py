"""What a GPU must tell, in blocks of a few minutes each; see `__main__`."""
