"""A cluster emulated on one machine; its command line is python -m bench.cluster (launch.py)."""

from bench.cluster.namespaces import require_namespaces
from bench.cluster.nodes import Cluster
from bench.cluster.ranks import hold_port, run_ranks

__all__ = ["Cluster", "hold_port", "require_namespaces", "run_ranks"]
