"""All-reduce formulas by hand, and the clusters they are asked about."""

import dataclasses

import pytest

from bench.simulator.network import (
    ALGORITHMS,
    PRESETS,
    Cluster,
    allreduce_seconds,
    fastest,
    hierarchical_seconds,
    preset,
    ring_seconds,
    tree_seconds,
)

DGX = PRESETS["dgx-a100-tcp"].cluster


def test_ring_and_tree_by_hand():
    assert ring_seconds(4, 1e9, 1e8, 0.1) == pytest.approx(2 * 3 / 4 * 10 + 6 * 0.1)
    assert tree_seconds(8, 1e9, 1e8, 0.1) == pytest.approx(20 + 2 * 3 * 0.1)
    assert tree_seconds(5, 1e9, 1e8, 0.1) == pytest.approx(20 + 2 * 3 * 0.1)  # the depth is rounded up
    assert tree_seconds(2, 1e9, 1e8, 0.1) == pytest.approx(ring_seconds(2, 1e9, 1e8, 0.1))
    assert ring_seconds(1, 1e9, 1e8, 0.1) == tree_seconds(1, 1e9, 1e8, 0.1) == 0.0


def test_hierarchical_is_a_ring_in_the_node_and_rings_of_parts_between_nodes():
    c = Cluster(2, 4, inter_gbps=8.0, intra_gbps=80.0, latency=0.01, intra_latency=0.001)  # 1e9, 1e10 bytes/s
    halves = 2 * (3 / 4 * 1e9 / 1e10 + 3 * 0.001)  # reduce-scatter and all-gather
    between = 2 * (1 / 2) * (1e9 / 4) / (1e9 / 4) + 2 * 1 * 0.01  # a fourth of the bytes on a fourth of the cards
    assert hierarchical_seconds(c, 1e9) == pytest.approx(halves + between)
    assert allreduce_seconds(c, 1e9, "ring") == pytest.approx(2 * 7 / 8 + 14 * 0.01)  # at the slowest hop's pace
    assert allreduce_seconds(c, 1e9, "tree") == pytest.approx(1 + 2 * (1 * 0.01 + 3 * 0.001))


def test_one_worker_a_node_makes_ring_and_hierarchical_equal_and_a_lone_worker_waits_for_nobody():
    c = Cluster(5, 1, 1.0, latency=0.01, overhead=0.5)
    assert allreduce_seconds(c, 1e8, "ring") == pytest.approx(allreduce_seconds(c, 1e8, "hierarchical"))
    assert allreduce_seconds(c, 0.0, "ring") == pytest.approx(0.5 + 8 * 0.01)
    assert all(allreduce_seconds(Cluster(1, 1, overhead=0.5), 1e8, a) == 0.0 for a in ALGORITHMS)


def test_one_node_uses_the_links_inside_it():
    c = Cluster(1, 8, inter_gbps=0.001, intra_gbps=8.0)
    for algorithm, seconds in (("ring", 1.75), ("hierarchical", 1.75), ("tree", 2.0)):
        assert allreduce_seconds(c, 1e9, algorithm) == pytest.approx(seconds)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_allreduce_takes_longer_with_every_knob(algorithm):
    base = allreduce_seconds(DGX, 1e9, algorithm)
    slower = dict(nodes=32, inter_gbps=40.0, efficiency=0.4, overhead=0.1, latency=0.1)
    for name, value in slower.items():
        assert allreduce_seconds(dataclasses.replace(DGX, **{name: value}), 1e9, algorithm) > base, name
    assert allreduce_seconds(DGX, 2e9, algorithm) > base
    inside = dataclasses.replace(DGX, nodes=1)
    for name, value in dict(intra_gbps=10.0, intra_latency=0.1, workers_per_node=16).items():
        slow = dataclasses.replace(inside, **{name: value})
        takes, took = (allreduce_seconds(c, 1e9, algorithm) for c in (slow, inside))
        assert takes > took, name


def test_many_nodes_over_slow_hops_are_served_by_a_tree():
    assert fastest(PRESETS["internet-10000"].cluster, 5e8) == "tree"
    assert fastest(DGX, 5e8) == "hierarchical"


def test_presets_hold_the_paper_s_facts():
    roce, tcp, rtx = (preset(name).cluster for name in ("dgx-a100-roce", "dgx-a100-tcp", "rtx3090"))
    assert (roce.nodes, roce.workers_per_node, roce.inter_gbps) == (16, 8, 800.0)
    assert (tcp.nodes, tcp.workers_per_node, tcp.inter_gbps) == (16, 8, 80.0)
    assert (rtx.nodes, rtx.workers_per_node) == (10, 8)
    assert "inter_gbps" not in preset("rtx3090").facts  # not known: assumed
