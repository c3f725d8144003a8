"""Tasks: data in three parts (training, tuning, test), a model, an inner optimizer.

A task fits in memory. Its batches are a pure function of (seed, step), for all workers at once. No model has BatchNorm,
which cannot update its running statistics under vmap.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import _muon as muon

from training.data.samples import generator

Split = Literal["tuning", "test"]
Batch = tuple[Tensor, Tensor]
Draw = Callable[[int, int, int, int], Batch]
"""(seed, step, workers, batch) -> inputs and targets, [workers, batch, ...] each."""

# -- the inner optimizer: every worker has a row of parameters and a row of state ---------------------------------


MUON = 0.95  # its momentum
COEFFICIENTS = (muon.DEFAULT_A, muon.DEFAULT_B, muon.DEFAULT_C)
newton_schulz = torch.vmap(
    functools.partial(
        muon._zeropower_via_newtonschulz, ns_coefficients=COEFFICIENTS, ns_steps=muon.DEFAULT_NS_STEPS, eps=muon.EPS
    )
)


@dataclass(frozen=True)
class Inner:
    """SGD with momentum (no weight decay), AdamW, or Muon for `matrices` and AdamW for the other parameters."""

    name: Literal["sgd", "adamw", "muon"]
    lr: float  # at its peak
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float | None = None  # largest norm of a worker's gradient
    matrices: tuple[tuple[slice, int, int], ...] = ()  # Muon's: their place in a row of parameters, rows, columns

    def start(self, x: Tensor) -> InnerState:
        pace: Any = 1 - self.betas[0]
        if self.matrices:
            pace = torch.full_like(x[0], pace)
            for place, *_ in self.matrices:
                pace[place] = 1 - MUON
        return InnerState(self, pace, torch.zeros_like(x), None if self.name == "sgd" else torch.zeros_like(x))


@dataclass
class InnerState:
    """The moments, [workers, n] each, with the formulas of torch.optim.SGD, AdamW and Muon (its learning rate
    adjusted to AdamW's: adjust_lr_fn="match_rms_adamw")."""

    inner: Inner
    pace: Any  # of the first moment: a number, or [n]
    first: Tensor
    second: Tensor | None
    steps: int = 0

    def step(self, x: Tensor, gradient: Tensor, lr: float) -> None:
        """Updates x in place. x, gradient: [workers, n]."""
        gradient = clip_rows(gradient, self.inner.clip)
        self.steps += 1
        if self.second is None:
            self.first.mul_(self.inner.momentum).add_(gradient)
            x.sub_(self.first, alpha=lr)
            return
        one, two = self.inner.betas
        x.mul_(1 - lr * self.inner.weight_decay)
        before = [x[:, place].clone() for place, *_ in self.inner.matrices]
        self.first.lerp_(gradient, self.pace)
        self.second.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        root = (self.second.sqrt() / math.sqrt(1 - two**self.steps)).add_(1e-8)
        x.addcdiv_(self.first, root, value=-lr / (1 - one**self.steps))
        for old, (place, rows, columns) in zip(before, self.inner.matrices, strict=True):
            nesterov = gradient[:, place].lerp(self.first[:, place], MUON)
            update = newton_schulz(nesterov.unflatten(1, (rows, columns))).flatten(1)
            x[:, place] = torch.sub(old, update, alpha=lr * 0.2 * math.sqrt(max(rows, columns)))


def clip_rows(gradient: Tensor, limit: float | None) -> Tensor:
    """Clips each row to norm `limit`, as torch.nn.utils.clip_grad_norm_ does."""
    if limit is None:
        return gradient
    return gradient * (limit / (gradient.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)


def cosine(step: int, total: int) -> float:
    """The learning rate of 0-based `step`, as a share of the peak."""
    return 0.5 * (1 + math.cos(math.pi * step / total))


@dataclass(frozen=True, eq=False)
class Task:
    """A model with its data. held_out: inputs and targets, [n, ...] each. batch: samples per worker and step."""

    build: Callable[[], nn.Module]  # draws the weights from torch's default generator
    loss: Callable[[Any, Tensor], Tensor]  # (outputs, targets) -> 0-d mean
    draw: Draw
    held_out: Mapping[Split, Batch]
    inner: Inner  # the tuning multiplies its lr
    batch: int


def places(n: int, seed: int, step: int, workers: int, batch: int) -> Tensor:
    """Indices below n with replacement, int64 [workers, batch]."""
    return torch.randint(n, (workers, batch), generator=generator(seed, step))


def labelled_draw(inputs: Tensor, labels: Tensor) -> Draw:
    """Draws samples of [n, ...] with labels, int64 [n]."""

    def draw(seed: int, step: int, workers: int, batch: int) -> Batch:
        at = places(len(inputs), seed, step, workers, batch)
        return inputs[at], labels[at]

    return draw


# -- pictures -----------------------------------------------------------------------------------------------------


def digits() -> Task:
    """scikit-learn's digits and a perceptron with 0.28 M parameters; three fifths of the images are for training."""
    from sklearn.datasets import load_digits

    from bench.standin import build_model

    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    labels = torch.from_numpy(data.target).long()
    number = torch.arange(len(labels)) % 5
    training = number > 1
    images = (images - images[training].mean()) / images[training].std()
    return Task(
        lambda: build_model(256),
        F.cross_entropy,
        labelled_draw(images[training], labels[training]),
        {"test": (images[number == 0], labels[number == 0]), "tuning": (images[number == 1], labels[number == 1])},
        Inner("sgd", 0.025),
        batch=16,
    )


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with GroupNorm and a shortcut. Halves the resolution if stride is 2."""

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
    """[n, 3, 16, 16] -> logits [n, 10]. 8, 16 and 32 channels, 0.02 M parameters."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2), ResidualBlock(16, 32, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def cifar_data() -> tuple[Batch, dict[Split, Batch]]:
    """10,000 training images, 1,000 others for tuning, 1,000 of the test set; 16 x 16 pixels, no augmentation."""
    from vision.data import cifar10

    train, test = cifar10()

    def take(of: Any, indices: Tensor) -> Batch:
        return F.avg_pool2d(of.normalise(of.images[indices]), 2), of.labels[indices]

    order, tested = (torch.randperm(len(of), generator=generator(i)) for i, of in enumerate((train, test)))
    held_out: dict[Split, Batch] = {"tuning": take(train, order[10_000:11_000]), "test": take(test, tested[:1_000])}
    return take(train, order[:10_000]), held_out


def cifar() -> Task:
    training, held_out = cifar_data()
    return Task(SmallResNet, F.cross_entropy, labelled_draw(*training), held_out, Inner("sgd", 0.05), batch=8)


# -- text: the Gutenberg books, as bytes or as tokens ---------------------------------------------------------------

CONTEXT, WINDOWS = 48, 1024  # of bytes; WINDOWS are held out
GPT2_TINY = {"vocab_size": 256, "n_positions": CONTEXT, "n_layer": 2, "n_head": 4, "n_embd": 48}
Texts = tuple[Tensor, dict[Split, Tensor]]


class Layer(nn.Module):
    """A pre-norm transformer layer with causal attention. [batch, time, width] -> the same shape."""

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
    """Bytes int64 [batch, time] -> logits [batch, time, 256]. The output layer shares the embedding's weight."""

    def __init__(self, width: int = 48, layers: int = 2, heads: int = 4, context: int = CONTEXT):
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for weight in (self.embedding.weight, self.position.weight):  # the shared weight then gives logits of size 1
            nn.init.normal_(weight, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h)
        return self.norm(h) @ self.embedding.weight.T


class GPT2(nn.Module):
    """transformers' GPT-2 without dropout. It gets its causal mask, [1, 1, time, time], because transformers makes the
    mask by a copy from the CPU, which a CUDA graph cannot have."""

    def __init__(self):
        from language.model import GPT2Config, GPT2LMHeadModel

        super().__init__()
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        none |= {"bos_token_id": None, "eos_token_id": None}
        # vmap supports no other attention
        self.model = GPT2LMHeadModel(GPT2Config(**GPT2_TINY, **none, attn_implementation="eager"))

    def forward(self, x: Tensor) -> Tensor:
        later = torch.full((x.shape[-1],) * 2, torch.finfo(torch.float32).min, device=x.device).triu(1)
        return self.model(x, attention_mask=later[None, None]).logits


@functools.cache
def books() -> Texts:
    """The books for training, and four held-out books each for tuning and the test, as bytes, uint8."""
    from language.data import gutenberg_file
    from language.prepare import read_documents

    found = list(read_documents(gutenberg_file()))
    held = random.Random(0).sample(range(len(found)), 8)

    def encode(some: Iterable[int]) -> Tensor:
        return torch.frombuffer(bytearray("\n".join(found[i] for i in some).encode()), dtype=torch.uint8)

    training = encode(i for i in range(len(found)) if i not in held)
    return training, {"tuning": encode(held[:4]), "test": encode(held[4:])}


def windows(text: Tensor, starts: Tensor) -> Batch:
    """Inputs and next bytes, int64 [..., CONTEXT], from a text [n] of bytes and starts, int64 [...]."""
    found = text[starts[..., None] + torch.arange(CONTEXT + 1)].long()
    return found[..., :-1], found[..., 1:]


def next_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats per byte. logits: [batch, time, vocabulary]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text_task(build: Callable[[], nn.Module], lr: float) -> Task:
    """AdamW, gradients clipped to norm 1. WINDOWS held-out windows of each split, at equal distances."""
    training, held_out = books()

    def draw(seed: int, step: int, workers: int, batch: int) -> Batch:
        return windows(training, places(len(training) - CONTEXT, seed, step, workers, batch))

    def spread(text: Tensor) -> Batch:
        return windows(text, torch.linspace(0, len(text) - CONTEXT - 1, WINDOWS).long())

    spreads = {split: spread(text) for split, text in held_out.items()}
    return Task(build, next_loss, draw, spreads, Inner("adamw", lr, clip=1.0), batch=8)


def with_muon(task: Task) -> Task:
    """The task with Muon for all matrices but embeddings."""
    matrices, begin = [], 0
    for name, p in task.build().named_parameters():
        if p.ndim == 2 and not any(part in name for part in ("embedding", "position", "wte", "wpe")):
            matrices.append((slice(begin, begin + p.numel()), *p.shape))
        begin += p.numel()
    return replace(task, inner=replace(task.inner, name="muon", matrices=tuple(matrices)))


TASKS: dict[str, Callable[[], Task]] = {
    "digits": digits,
    "cifar": cifar,
    "bytes": lambda: text_task(ByteGPT, 8e-3),
    "bytes_muon": lambda: with_muon(load_task("bytes")),
    "gpt2_muon": lambda: with_muon(load_task("gpt2")),
    "gpt2": lambda: text_task(GPT2, 8e-3),
}


@functools.cache
def load_task(name: str) -> Task:
    return TASKS[name]()
