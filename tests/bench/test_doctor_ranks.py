"""core.doctor on the emulated cluster."""

import json
import os
from pathlib import Path

import pytest

from tests.bench.emulated import python

# The doctor's own functions, and beside them CO2 with the recommended settings and a step of a known length.
SCRIPT = """
import sys, time
from dataclasses import replace
import torch, torch.distributed as dist
from torch import nn
import core.tau
from bench.cluster import Cluster, require_namespaces, run_ranks
from core import CO2, CO2Config, CompressionConfig
from core.doctor import measure
from core.doctor.measure import compressions, links
from core.doctor.report import choose

CPU = torch.device("cpu")

def settings(wire):
    return replace(CO2Config.recommended(), compression=CompressionConfig(wire))

def doctor(params, step, wire):
    found = links([[0], [1]], CPU)
    seconds = {name: each["seconds"] for name, each in compressions(params, found["all"], CPU, 60.0).items()}
    choice = choose(settings(wire), 2, step, seconds, 0.0)
    return found["across"].bandwidth, choice["tau"], choice["compression"]

def training(params, step, wire):
    co2 = CO2([p := nn.Parameter(torch.zeros(params))], settings(wire), timeout=60)
    taus = []
    while len(taus) < 8 or (len(set(taus[-3:])) > 1 and len(taus) < 25):
        due = time.perf_counter() + step
        with torch.no_grad():
            p.add_(dist.get_rank() - 0.5)
        time.sleep(max(0.0, due - time.perf_counter()))
        if co2.step():
            taus.append(co2.tau)
    co2.allreduce.restore(co2.rounds, in_flight=False)
    return co2.tau, co2.reducer.kind, taus

def work(params, step, wire, quick):
    if quick:
        measure.LONG, measure.SAMPLE_SECONDS = 0.25, 0.25
    core.tau.COST = 1.0  # a boundary's own work is noise where two workers share what is left of two cores
    dist.init_process_group("gloo")
    found = doctor(params, step, wire), training(params, step, wire)
    dist.barrier()
    return found

require_namespaces()
torch.set_num_threads(1)
rate, params, step, wire = float(sys.argv[1]), int(float(sys.argv[2])), float(sys.argv[3]), sys.argv[4]
with Cluster(2, rate) as cluster:
    (told, trained), other = run_ranks(work, cluster, 1, 2, params, step, wire, rate == 100, timeout=240)
    assert told == other[0], (told, other[0])
    print(*told, *trained[:2])
    print(trained[2], file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "params", "step", "given"),
    [
        (10, 2e6, 0.4, "auto"),
        (100, 3e6, 0.1, "auto"),
        (1000, 8e6, 0.15, "float32"),  # int4 takes what cores are left, there
    ],
)
def test_its_rate_is_the_links_and_its_tau_that_of_tau_auto(tmp_path, rate, params, step, given):
    """Of the message's bytes few must fit the shaper's bucket, 256 kB, which is full again after each rest."""
    (tmp_path / "script.py").write_text(SCRIPT)
    said = python(tmp_path / "script.py", rate, params, step, given, skips=True)
    bandwidth, tau, compression, settled, over = said.split()
    assert float(bandwidth) == pytest.approx(1e6 * rate, rel=0.1)
    assert compression == over and abs(int(tau) - int(settled)) <= 1 < int(tau), said


@pytest.mark.slow
def test_the_command_on_nodes_of_two(tmp_path: Path):
    """By torchrun on each node: what links carry within and across, one screen, and the file."""
    file = tmp_path / "cluster.json"
    doctor = ["-m", "core.doctor", "--params", "125e6", "--step_ms", "80", "--out", str(file)]
    nodes = ["--nodes", "2", "--ranks-per-node", "2", "--rate", "100mbit", "--"]
    said = python("-m", "bench.cluster", *nodes, *doctor, timeout=400, skips=True)
    _, *screen = said.splitlines()
    assert len(screen) <= 20 and max(map(len, screen)) <= 100, said
    assert screen[0] == f"workers      4 on 2 nodes ({os.uname().nodename}), gloo"
    found = json.loads(file.read_text())
    rates = {name: link["bandwidth_bits_per_second"] for name, link in found["links"].items()}
    assert rates["across"] == pytest.approx(100e6, rel=0.1) and rates["within"] > 1e9
    assert (found["workers_per_node"], [node["ranks"] for node in found["nodes"]]) == (2, [[0, 1], [2, 3]])
    (settings,) = found["settings"]
    chosen = settings["tau"], settings["compression"]
    assert chosen == (192, "int4"), "8 s of an all-reduce, and 2.5 times as long to rest"
    seconds = {name: compression["seconds"] for name, compression in found["compressions"].items()}
    assert seconds["float32"] > 4 * seconds["int4"] > 4 * 5
