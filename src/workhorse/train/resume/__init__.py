"""Going on with a run that stopped."""
