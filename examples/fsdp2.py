"""FSDP2 in a node, CO2 across nodes, as with torchtitan: torchrun --nproc-per-node 4 examples/fsdp2.py [FOLDER]"""

import sys

import torch
import torch.distributed as dist
from co2_training import CO2, CO2Config, load, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, FOLDER = 150, sys.argv[1] if len(sys.argv) > 1 else "checkpoints_fsdp2"
OF_A_NODE = 2  # workers; on a cluster LOCAL_WORLD_SIZE

dist.init_process_group("gloo")  # with GPUs: "cpu:gloo,cuda:nccl", and a mesh of "cuda"
rank, workers = dist.get_rank(), dist.get_world_size()
shape, names = (workers // OF_A_NODE, OF_A_NODE, 1), ("dp_replicate", "dp_shard", "tp")
mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)["dp_replicate", "dp_shard"]

torch.manual_seed(0)  # the workers of a node must begin alike
points = torch.randn(2000, 16)
labels = (points @ torch.randn(16, 4)).argmax(1)
x, y = points[300 + rank :: workers], labels[300 + rank :: workers]
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)), nn.Linear(16, 4))
for block in model:
    fully_shard(block, mesh=mesh["dp_shard"])  # not over both: that would average gradients across nodes, too
fully_shard(model, mesh=mesh["dp_shard"])
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
torch.manual_seed(rank)
with CO2(model.parameters(), CO2Config.recommended(steps=STEPS, tau=6), mesh=mesh) as co2:
    step, due = load(FOLDER, model, optimizer, co2) or 0, False
    if rank == 0:
        print(f"resumed at step {step}")
    while step < STEPS:
        batch = torch.randint(len(x), (32,))
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        co2.step()
        due |= step % 50 == 0
        if due and co2.at_boundary:
            save(FOLDER, model, optimizer, co2, step=step)  # each worker its shards
            due = False

right = (model(points[:300]).argmax(1) == labels[:300]).float().mean()  # every worker: FSDP2 gathers
if rank == 0:
    print(f"accuracy {right:.4f} after {step} steps of {workers} workers, {OF_A_NODE} a node")
dist.destroy_process_group()
