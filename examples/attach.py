"""Any optimiser, by its step's hook: torchrun --nproc-per-node 2 examples/attach.py

For a loop that somebody else wrote: here `fit` knows nothing of other workers. Not with a GradScaler, see attach().
pip install . scikit-learn
"""

import torch
import torch.distributed as dist
from co2_training import CO2Config
from co2_training.integrations.optimizer import attach
from sklearn.datasets import load_digits
from torch import Tensor, nn


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int) -> None:
    for _ in range(steps):
        batch = torch.randint(len(x), (32,))
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()


dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float() / 16
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
torch.manual_seed(rank)
with attach(optimizer, model.parameters(), CO2Config.recommended(steps=300)):
    fit(model, optimizer, images[300 + rank :: workers], labels[300 + rank :: workers], 300)

if rank == 0:
    right = (model(images[:300]).argmax(1) == labels[:300]).float().mean()
    print(f"accuracy {right:.4f} after 300 steps of {workers} workers")
dist.destroy_process_group()
