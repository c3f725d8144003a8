"""What a run leaves in its folder: settings, measurements, rounds, a summary; the same for other trackers."""
