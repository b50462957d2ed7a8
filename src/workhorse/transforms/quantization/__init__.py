"""Linear layers and experts of 8 or 4 bits a weight."""
