"""The run folder: settings, measurements, rounds and a summary, also for other trackers."""
