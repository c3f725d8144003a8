"""A run whose workers come and go: what its loop does otherwise then, and the launcher that starts and lists them."""
