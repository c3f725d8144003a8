"""After destroy_process_group() nothing here refers to a group: gloo's threads end, and the interpreter's end is safe.

A thread of gloo's that drops a collective's tensor while the interpreter ends takes the process down by std::terminate.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A fresh process for each rank: those of run_distributed are forked from one that has imported nearly all of torch.
SCRIPT = """
import gc, sys
from pathlib import Path

import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # a backend that moves nothing, as NCCL moves nothing of a CPU's
from core import CO2Config, WireConfig, make_method
from core.groups import host_group

rank, folder, kinds = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
gc.disable()  # a cycle of references is no reason either

def threads():
    return sum("gloo" in task.read_text() for task in Path("/proc/self/task").glob("*/comm"))

def settings(kind):
    return {
        "co2": lambda: {"co2": CO2Config(tau=2)},
        "co2 sharded": lambda: {"co2": CO2Config(tau=2), "shard": True},
        "co2 of a subgroup": lambda: {"co2": CO2Config(tau=2), "group": [dist.new_group([i]) for i in range(2)][rank]},
        "ddp over int4": lambda: {"ddp_wire": WireConfig("int4")},
    }[kind]()

def train(kind):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)  # imports torch._dynamo
    model, method = make_method(kind.split()[0], net, **settings(kind))
    with method:
        for step in range(12):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            method.step()
    return model, method

kept = []  # as a script's own names are at its end
for kind in kinds:
    store = dist.FileStore(f"{folder}/{kind}", 2)
    dist.init_process_group("fake" if kind == "host" else "gloo", store=store, rank=rank, world_size=2)
    if kind == "host":
        assert (made := host_group()) is host_group(), "made once"
        dist.barrier(made)  # else one rank ends it while the other still connects
        del made
    else:
        kept.append(train(kind))
    before = threads()
    dist.destroy_process_group()
    print(f"{kind}: {before > 0}, {threads()}")
"""
KINDS = ("co2", "co2 sharded", "co2 of a subgroup", "ddp over int4", "host")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in Linux's /proc")
def test_no_thread_of_gloos_is_left(tmp_path: Path):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path), *KINDS], env=env, stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        said, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert said.splitlines() == [f"{kind}: True, 0" for kind in KINDS]
