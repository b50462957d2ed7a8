"""Studies of design choices for `workhorse compare`, and programs that make pages of their own."""
