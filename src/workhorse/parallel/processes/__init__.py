"""The processes of a run: which they are, what starts them, and what they tell each other."""
