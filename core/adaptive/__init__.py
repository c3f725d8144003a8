"""What decides from measured times when a round ends and when its mean is merged."""
