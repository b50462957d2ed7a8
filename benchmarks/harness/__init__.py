"""How contestants are run in turn, measured and shown; what all of them are given."""
