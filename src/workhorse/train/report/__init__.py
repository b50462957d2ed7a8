"""Reports of a training run: metrics, charts, the HTML page, experiment trackers."""
