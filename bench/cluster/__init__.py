"""A cluster emulated on one machine; its command line is python -m bench.cluster (launch.py)."""

from bench.cluster.namespaces import require_namespaces
from bench.cluster.nodes import Cluster
from bench.cluster.ranks import run_ranks

__all__ = ["Cluster", "require_namespaces", "run_ranks"]
