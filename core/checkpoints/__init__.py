"""Checkpoints that are whole or not there: of the train scripts, and of a loop of one's own."""
