"""Averages that cross the network in fewer bytes."""
