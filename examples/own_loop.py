"""A loop of your own, with save and resume: torchrun --nproc-per-node 2 examples/own_loop.py [FOLDER]

pip install . scikit-learn
"""

import sys

import torch
import torch.distributed as dist
from co2_training import CO2, CO2Config, load, save
from sklearn.datasets import load_digits
from torch import nn

STEPS, FOLDER = 300, sys.argv[1] if len(sys.argv) > 1 else "checkpoints"

dist.init_process_group("gloo")  # with a GPU each: "cpu:gloo,cuda:nccl", and torch.cuda.set_device(LOCAL_RANK)
rank, workers = dist.get_rank(), dist.get_world_size()
images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float() / 16
x, y = images[300 + rank :: workers], labels[300 + rank :: workers]  # each worker has data of its own

model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
torch.manual_seed(rank)
with CO2(model.parameters(), CO2Config.paper(tau=12), buffers=model.buffers()) as co2:  # all begin as on rank 0
    step, due = load(FOLDER, model, optimizer, co2) or 0, False
    while step < STEPS:
        batch = torch.randint(len(x), (32,))
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        co2.step()
        due |= step % 100 == 0
        if due and co2.at_boundary:  # every hundred steps, where a round closes
            save(FOLDER, model, optimizer, co2, step=step)
            due = False

model.eval()  # the block has left all workers with one model
if rank == 0:
    right = (model(images[:300]).argmax(1) == labels[:300]).float().mean()
    print(f"accuracy {right:.4f} after {step} steps of {workers} workers")
dist.destroy_process_group()
