"""Studies of design choices, for `workhorse compare`, and a page to look at."""
