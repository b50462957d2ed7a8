"""The base class of configs, their errors, and settings from the command line that change them."""
