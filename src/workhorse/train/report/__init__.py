"""What a training run tells: metrics, charts, a page, trackers."""
