"""A model under a layout of tensor, pipeline and data parallelism: its name, its parts, its loop, its checkpoints."""
