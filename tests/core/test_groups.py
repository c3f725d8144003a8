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
from core import AutoConfig, CO2Config, WireConfig, make_method
from core.groups import host_group

def threads():
    return sum("gloo" in task.read_text() for task in Path("/proc/self/task").glob("*/comm"))

kind, rank, rendezvous = sys.argv[1], int(sys.argv[2]), sys.argv[3]
gc.disable()  # a cycle of references is no reason either
if kind == "host":
    import torch.testing._internal.distributed.fake_pg  # a backend that moves nothing, as NCCL moves nothing of a CPU's
default = "fake" if kind == "host" else "gloo"
dist.init_process_group(default, store=dist.FileStore(rendezvous, 2), rank=rank, world_size=2)
net = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)  # imports torch._dynamo
settings = {
    "co2": {"co2": CO2Config(tau=2)},
    "co2 sharded": {"co2": CO2Config(tau=2), "shard": True},
    "co2 of a subgroup": {"co2": CO2Config(tau=2), "group": [dist.new_group([i]) for i in range(2)][rank]},
    "ddp over int4": {"ddp_wire": WireConfig("int4")},
    "auto": {"auto": AutoConfig(share=1e-9, steps=4)},
}
if kind == "host":
    assert host_group() is host_group(), "made once"
else:
    model, method = make_method(kind.split()[0], net, **settings.pop(kind))
    settings.clear()
    with method:
        for step in range(12):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            method.step()
    assert kind != "auto" or method.ddp is None, "it has gone over to CO2"
before = threads()
dist.destroy_process_group()
print(before, threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in Linux's /proc")
@pytest.mark.parametrize("kind", ["co2", "co2 sharded", "co2 of a subgroup", "ddp over int4", "auto", "host"])
def test_no_thread_of_gloos_is_left(kind: str, tmp_path: Path):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", SCRIPT, kind]
    ranks = [
        subprocess.Popen([*arguments, str(rank), str(tmp_path / "meet")], env=env, stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        said, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        before, after = map(int, said.split())
        assert before > 0 and after == 0
