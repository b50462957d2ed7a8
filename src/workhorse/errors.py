"""The errors a user can mend."""


class WorkhorseError(ValueError):
    """Wrong input or usage: one line with the fact, the value and the remedy.

    The command line prints the line and exits 2. A bug of ours raises anything else and exits 1.
    """
