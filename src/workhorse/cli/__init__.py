"""The command line: one thin file per verb over a function of the library."""
