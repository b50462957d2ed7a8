"""Base class of the configs of models and runs, their errors, and command-line overrides."""
