"""The reports of a training run: metrics, charts, a page, trackers."""
