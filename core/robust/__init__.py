"""Runs that survive what real clusters do: numbers that are not finite, drifting replicas, lost workers."""
