"""Memory of the host, beside a GPU."""
