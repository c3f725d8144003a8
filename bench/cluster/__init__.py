"""A cluster emulated on one machine; its command line is python -m bench.cluster."""

from bench.cluster.nodes import Cluster, hold_port, require_namespaces, run_ranks, sent_bytes

__all__ = ["Cluster", "hold_port", "require_namespaces", "run_ranks", "sent_bytes"]
