"""What a training makes less."""
