"""`python -m workhorse` is the command `workhorse`."""

from workhorse.cli.main import run

run()
