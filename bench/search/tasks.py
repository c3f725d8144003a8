"""What bench.search trains: data in three parts that do not overlap (training, tuning, test), a model, an optimiser.

Every task fits in memory and draws a batch as a pure function of (seed, step), for all workers at once. No model has a
BatchNorm: under vmap its running statistics cannot be updated in place, so GroupNorm stands in its place.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.search.inner import Inner
from core.errors import UserError
from training.sampling import generator

Split = Literal["tuning", "test"]
Shards = Literal["iid", "sorted"]
SHARDS: tuple[Shards, ...] = ("iid", "sorted")
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """A model with its data. Inputs and targets of a step: [workers, batch, ...] each."""

    name: str
    about: str
    """For the report."""
    build: Callable[[], nn.Module]
    """The model, its weights drawn from torch's default generator."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """(outputs, targets) -> 0-d mean, in nats."""
    draw: Callable[[int, int, int, int, Shards], Batch]
    """(seed, step, workers, batch, shards) -> the workers' batches. sorted: worker i draws from the i-th of as many
    equal parts of the training set, sorted by label or, of a text, as it is: other books."""
    held_out: Mapping[Split, Batch]
    """Inputs and targets, [n, ...] each."""
    inner: Inner
    """The inner optimiser; its lr is what the search multiplies."""
    batch: int
    """Samples per worker and step."""


def stacked_draw(inputs: Tensor, labels: Tensor) -> Callable[[int, int, int, int, Shards], Batch]:
    """`draw` of a labelled set, with replacement. inputs: [n, ...]; labels: int64 [n]."""
    by_label = labels.argsort(stable=True)

    def draw(seed: int, step: int, workers: int, batch: int, shards: Shards) -> Batch:
        at = places(len(labels), seed, step, workers, batch, shards)
        index = by_label[at] if shards == "sorted" else at
        return inputs[index], labels[index]

    return draw


def places(n: int, seed: int, step: int, workers: int, batch: int, shards: Shards) -> Tensor:
    """Numbers below n, int64 [workers, batch]; sorted: those of worker i in the i-th of equal parts of range(n)."""
    rng = generator(seed, step)
    if shards == "iid":
        return torch.randint(n, (workers, batch), generator=rng)
    part = n // workers
    if not part:
        raise UserError(f"workers={workers}: the training set has {n} samples, too few for a part each; choose fewer")
    return torch.randint(part, (workers, batch), generator=rng) + part * torch.arange(workers)[:, None]


# -- digits -----------------------------------------------------------------------------------------------------


def digits() -> Task:
    from sklearn.datasets import load_digits

    from bench.peers.model import build_model

    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    labels = torch.from_numpy(data.target).long()
    number = torch.arange(len(labels)) % 5
    training = number > 1
    images = (images - images[training].mean()) / images[training].std()
    return Task(
        "digits",
        "scikit-learn's digits (three fifths for training, one for tuning, one for the test), the perceptron of "
        "bench.peers with 0.28 M parameters, SGD with momentum 0.9, cosine schedule, 16 samples per worker and step",
        lambda: build_model(256),
        F.cross_entropy,
        stacked_draw(images[training], labels[training]),
        {"test": (images[number == 0], labels[number == 0]), "tuning": (images[number == 1], labels[number == 1])},
        Inner("sgd", 0.025),
        batch=16,
    )


# -- CIFAR-10 ---------------------------------------------------------------------------------------------------

CIFAR_TRAINING, CIFAR_HELD_OUT = 10_000, 1_000


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with GroupNorm beside a shortcut; halves the resolution where stride is 2."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, after) for _ in range(2))
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 or before != after else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(h)) + (x if self.shortcut is None else self.shortcut(x)))


class SmallResNet(nn.Module):
    """[n, 3, 16, 16] -> logits [n, 10]; 8, 16 and 32 channels, 0.02 M parameters."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2), ResidualBlock(16, 32, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def cifar() -> Task:
    from vision.data import cifar10

    train, test = cifar10()

    def take(images: Tensor, normalise: Callable[[Tensor], Tensor]) -> Tensor:
        return F.avg_pool2d(normalise(images), 2)

    order = torch.randperm(len(train), generator=generator(0))
    chosen, tuning = order[:CIFAR_TRAINING], order[CIFAR_TRAINING : CIFAR_TRAINING + CIFAR_HELD_OUT]
    tested = torch.randperm(len(test), generator=generator(1))[:CIFAR_HELD_OUT]
    return Task(
        "cifar",
        f"CIFAR-10 at 16 x 16 pixels, {CIFAR_TRAINING} images for training, {CIFAR_HELD_OUT} of the training set for "
        f"tuning and {CIFAR_HELD_OUT} of the test set, no augmentation, a ResNet with GroupNorm and 0.02 M parameters, "
        "SGD with momentum 0.9, cosine schedule, 8 samples per worker and step",
        SmallResNet,
        F.cross_entropy,
        stacked_draw(take(train.images[chosen], train.normalise), train.labels[chosen]),
        {
            "tuning": (take(train.images[tuning], train.normalise), train.labels[tuning]),
            "test": (take(test.images[tested], test.normalise), test.labels[tested]),
        },
        Inner("sgd", 0.05),
        batch=8,
    )


# -- bytes ------------------------------------------------------------------------------------------------------

CONTEXT = 48
WINDOWS = 1024  # held out


class Layer(nn.Module):
    """A pre-normalised transformer layer with causal attention. [batch, time, width] -> the same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        size = width // self.heads
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, size).permute(2, 0, 3, 1, 4)
        later = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(size)).masked_fill(later, -math.inf).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteGPT(nn.Module):
    """Bytes int64 [batch, time] -> logits [batch, time, 256], the output layer sharing the embedding's weight."""

    def __init__(self, width: int = 48, layers: int = 2, heads: int = 4, context: int = CONTEXT):
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for weight in (self.embedding.weight, self.position.weight):  # logits of size one, the weight being shared
            nn.init.normal_(weight, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h)
        return self.norm(h) @ self.embedding.weight.T


def byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats per byte. logits: [batch, time, 256]; targets: int64 [batch, time]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def windows(text: Tensor, starts: Tensor) -> Batch:
    """Inputs and the bytes that follow them, int64 [..., CONTEXT]. text: uint8 [n]; starts: int64 [...]."""
    found = text[starts[..., None] + torch.arange(CONTEXT + 1)].long()
    return found[..., :-1], found[..., 1:]


def books() -> tuple[Tensor, dict[Split, Tensor]]:
    """The text to train on and the held-out ones, uint8 each; four whole books for tuning and four for the test."""
    from language.data import data_folder
    from language.prepare import read_documents

    file = (data_folder() or Path()) / "gutenberg_en.txt.xz"
    if not file.is_file():
        raise UserError(f"task 'bytes' needs {file.name} in CO2_DATA: set it, or choose --tasks digits")
    documents = list(read_documents(file))
    held = random.Random(0).sample(range(len(documents)), 8)

    def text(numbers: list[int]) -> Tensor:
        joined = "\n".join(documents[i] for i in numbers).encode()
        return torch.frombuffer(bytearray(joined), dtype=torch.uint8)

    rest = text([i for i in range(len(documents)) if i not in held])
    return rest, {"tuning": text(held[:4]), "test": text(held[4:])}


def bytes_() -> Task:
    training, held = books()

    def draw(seed: int, step: int, workers: int, batch: int, shards: Shards) -> Batch:
        return windows(training, places(len(training) - CONTEXT, seed, step, workers, batch, shards))

    def spread(text: Tensor) -> Batch:
        return windows(text, torch.linspace(0, len(text) - CONTEXT - 1, WINDOWS).long())

    return Task(
        "bytes",
        "the Gutenberg books as bytes (four whole books for tuning, four for the test), a GPT of 2 layers, 48 wide, "
        "0.07 M parameters, AdamW (weight decay 0.01), cosine schedule, gradients of a worker clipped to norm 1, "
        f"8 windows of {CONTEXT} bytes per worker and step; the loss is in nats per byte",
        ByteGPT,
        byte_loss,
        draw,
        {"tuning": spread(held["tuning"]), "test": spread(held["test"])},
        Inner("adamw", 8e-3, clip=1.0),
        batch=8,
    )


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "bytes": bytes_, "cifar": cifar}


@functools.cache
def load(name: str) -> Task:
    return TASKS[name]()
