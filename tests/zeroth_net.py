"""A small network and its data, for tests of zeroth-order training."""

import torch
from torch import Tensor, nn

from language.zeroth import ZerothOrder

CPU = torch.device("cpu")
SAMPLES = 12  # of a step, over all workers


class Net(nn.Module):
    """Tied weights, a norm, biases and dropout."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Linear(6, 10, bias=False)
        self.norm = nn.LayerNorm(10)
        self.drop = nn.Dropout(0.5)
        self.back = nn.Linear(10, 6)
        self.back.weight = nn.Parameter(self.back.weight.detach())
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.back(self.drop(self.norm(self.embed(x)).tanh())))


def batch(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """All workers' samples of a step: [SAMPLES, 6]."""
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1000 + step), dtype=dtype)


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).pow(2).mean(1)


def share(step: int, rank: int, workers: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Uneven shares: the first has twice as many samples as each of the others, roughly."""
    sizes = [SAMPLES // (workers + 1)] * workers
    sizes[0] += SAMPLES - sum(sizes)
    return batch(step, dtype).split(sizes)[rank]


def rate(step: int) -> float:
    return 0.02 / (1 + step // 20)


def step_of(zo: ZerothOrder, model: nn.Module, step: int, dtype: torch.dtype = torch.float64):
    x = share(step, zo.data_rank, zo.data_workers, dtype)
    zo.lr = rate(step)
    return zo.step(lambda m: losses_of(m, x).mean(), count=len(x))
