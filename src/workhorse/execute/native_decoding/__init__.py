"""Native decoding: a whole decoding step as a program that one native operator runs."""
