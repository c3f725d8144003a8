"""Workers at unlike speeds: loss at equal seconds and samples/s, by the simulator's clock and the search's training."""
