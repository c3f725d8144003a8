"""A model on several devices: tensor, pipeline and data parallelism, ZeRO, and checkpoints for another layout."""
