"""What tasks share to read data: files and the cache, the samples that a worker sees, pictures and masks."""
