"""The command line: one thin file per verb, which calls a function of the library."""
