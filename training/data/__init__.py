"""Reads data for all tasks: files and the cache, the samples that a worker sees, pictures and masks."""
