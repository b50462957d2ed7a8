"""Our own work, as processes that do a round when asked; see `peers` for that of others."""
