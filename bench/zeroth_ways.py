"""Ways to tune a GPT-2 in little memory, for bench/zeroth_limit.py: with gradients, with adapters, and without."""

from __future__ import annotations

import training.prepared  # noqa: F401, transformers imports torchvision when it is installed

# isort: split
import ctypes
import functools
import itertools
import math
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from core.errors import DivergedError
from language.corpora import open_corpus, open_wikitext2
from language.zeroth import ZerothConfig, ZerothOrder
from language.zeroth.blocks import BlockStream
from training.sampling import generator

VOCABULARY, CONTEXT, HELD_OUT = 1024, 64, 128  # the last in windows
RANK, ALPHA = 8, 16.0  # of adapters
WAYS = {
    "AdamW": "adamw",
    "AdamW, recomputation": "adamw",
    "SGD, each gradient applied at once, recomputation": "sgd",
    "LoRA, AdamW": "lora",
    "LoRA, AdamW, recomputation": "lora",
    "LoRA, AdamW, recomputation, blocks uploaded": "lora",
    "zo": "zo",
    "zo, offload": "zo",
}
"""Way -> what steps it takes."""
KINDS = {"adamw": 1e-3, "sgd": 0.1, "lora": 3e-3, "zo": 5e-4}
"""What steps -> learning rate."""
NO_MEMORY = ("can't allocate memory", "bad_alloc", "can't start new thread")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt


@dataclass(frozen=True)
class Job:
    """A training: way of WAYS, a model of (layers, width), its weights' file. limit: of memory, in units of the
    weights; None: none."""

    way: str
    shape: tuple[int, int]
    base: Path
    batch: int
    steps: int
    lr: float
    seed: int = 0
    evaluates: bool = False
    limit: float | None = None

    def within(self, limit: float) -> Job:
        return replace(self, limit=limit)

    @property
    def weights_mb(self) -> float:
        return sum(p.numel() for p in blank(self.shape).parameters()) * 4e-6


# -- weights that lie in a file ---------------------------------------------------------------------------------------


def blank(shape: tuple[int, int]) -> GPT2LMHeadModel:
    """Without memory. shape: layers, width."""
    layers, width = shape
    sizes = {"vocab_size": VOCABULARY, "n_positions": CONTEXT}
    sizes |= {"n_layer": layers, "n_head": width // 64, "n_embd": width}
    rest = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"use_cache": False}
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(**sizes, **rest, bos_token_id=None, eos_token_id=None))


def random_base(path: Path, shape: tuple[int, int]) -> Path:
    """A file of weights that were never trained."""
    model = blank(shape).to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    return write(model, path)


def write(model: nn.Module, path: Path) -> Path:
    with path.open("wb") as file:
        for p in model.parameters():
            file.write(p.detach().contiguous().numpy().tobytes())
    return path


def opened(path: Path, shape: tuple[int, int], streamed: bool) -> GPT2LMHeadModel:
    """The weights of the file: of the blocks as they are mapped, where they are streamed; else copies in memory."""
    model = blank(shape)
    flat = torch.from_file(str(path), shared=True, size=sum(p.numel() for p in model.parameters()))
    start = 0
    for name, p in list(model.named_parameters()):
        view = flat[start : start + p.numel()].view(p.shape)
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(view if streamed and ".h." in name else view.clone()))
        start += p.numel()
    model.lm_head.weight = model.transformer.wte.weight
    return model.train()


def mapped(folder: str) -> Callable[[int], Tensor]:
    """Makes memory in files there, for BlockStream."""
    numbers = itertools.count()
    return lambda n: torch.from_file(f"{folder}/{next(numbers)}", shared=True, size=n, dtype=torch.uint8)


# -- gradients in little memory ---------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer, frozen, and beside it an adapter of rank RANK (Hu et al., arXiv 2106.09685)."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        n_in, n_out = inner.weight.shape  # as transformers' Conv1D has it
        self.inner = inner
        self.a = nn.Parameter(torch.randn(n_in, RANK) / math.sqrt(n_in))
        self.b = nn.Parameter(torch.zeros(RANK, n_out))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + (x @ self.a) @ self.b * (ALPHA / RANK)


class Recomputed(nn.Module):
    """A block that keeps its input alone for the backward pass, which computes it again. uploads: from copies of its
    frozen weights, which are there as long as it computes."""

    def __init__(self, block: nn.Module, uploads: bool):
        super().__init__()
        self.block, self.uploads = block, uploads

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._run, *args, use_reentrant=False, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self.uploads:
            return self.block(*args, **kwargs)
        weights = {n: p if p.requires_grad else p.detach().clone() for n, p in self.block.named_parameters()}
        return functional_call(self.block, weights, args, kwargs)


def with_gradients(model: GPT2LMHeadModel, job: Job) -> Callable[[Tensor], None]:
    """A step on a batch of tokens."""
    blocks = model.transformer.h
    if WAYS[job.way] == "lora":
        model.requires_grad_(False)
        torch.manual_seed(job.seed)
        for block in blocks:
            block.attn.c_attn = Adapted(block.attn.c_attn)
    if "recomputation" in job.way:
        for i, block in enumerate(blocks):
            blocks[i] = Recomputed(block, "uploaded" in job.way)
    params = [p for p in model.parameters() if p.requires_grad]
    if WAYS[job.way] == "sgd":
        for p in params:
            p.register_post_accumulate_grad_hook(functools.partial(apply_at_once, lr=job.lr))
        return lambda tokens: loss_of(model, tokens).backward()
    optimizer = torch.optim.AdamW(params, lr=job.lr, weight_decay=0.0)

    def step(tokens: Tensor) -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def apply_at_once(p: Tensor, lr: float) -> None:
    """SGD's step of a parameter whose gradient is there, which is freed: as in LOMO."""
    assert p.grad is not None
    p.data.add_(p.grad, alpha=-lr)
    p.grad = None


# -- a run ------------------------------------------------------------------------------------------------------------


def batches(tokens: Tensor, batch: int, steps: int, seed: int) -> Iterator[Tensor]:
    """int64 [batch, CONTEXT + 1] each."""
    for step in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT - 1, (batch,), generator=generator(seed, step))
        yield torch.stack([tokens[s : s + CONTEXT + 1] for s in starts.tolist()])


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Loss in nats a token, and the share of tokens that the model finds likeliest, on the first HELD_OUT windows."""
    windows = tokens[: HELD_OUT * CONTEXT + 1]
    losses, right = [], []
    for start in range(0, len(windows) - 1, 4 * CONTEXT):
        inputs = windows[:-1][start : start + 4 * CONTEXT].view(-1, CONTEXT)
        targets = windows[start + 1 : start + 1 + 4 * CONTEXT]
        logits = model(inputs).logits.flatten(0, 1)
        losses.append(float(cross_entropy(logits, targets)))
        right.append(float((logits.argmax(1) == targets).float().mean()))
    return {"loss": sum(losses) / len(losses), "accuracy": sum(right) / len(right)}


@functools.cache
def wikitext() -> tuple[Tensor, Tensor]:
    """To train on, and held out."""
    tokens = torch.from_numpy(open_wikitext2(open_corpus("pydoc", VOCABULARY)).astype("int64"))
    cut = len(tokens) * 4 // 5
    return tokens[:cut], tokens[cut:]


def make_base(path: Path, shape: tuple[int, int], steps: int, batch: int) -> dict[str, float]:
    """Trains a model on Python's documentation, into the file; what it is worth on the held-out text."""
    torch.set_num_threads(1)
    random_base(path, shape)
    model = opened(path, shape, streamed=False)
    tokens = torch.from_numpy(open_corpus("pydoc", VOCABULARY).train.astype("int64"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for some in batches(tokens, batch, steps, seed=0):
        loss_of(model, some).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
    write(model, path)
    return evaluate(model.eval(), wikitext()[1])


def warm_up(folder: Path) -> None:
    """What the first step of any process imports and keeps is no part of a model's memory."""
    base = random_base(folder / "tiny", (1, 64))
    tokens = torch.arange(4 * CONTEXT + 1)
    for way in ("AdamW", "LoRA, AdamW, recomputation, blocks uploaded"):
        _train(Job(way, (1, 64), base, 1, 1, 1e-3, evaluates=True), tokens, tokens)


def train(job: Job) -> dict[str, Any]:
    """One rank: whether the memory suffices (fits), and what it came to."""
    torch.set_num_threads(1)
    learn, held_out = wikitext()
    if job.limit is not None:
        restrict(round(job.limit * job.weights_mb * 1e6))
    try:
        return {"fits": True, "steps": job.steps} | _train(job, learn, held_out)
    except DivergedError:  # as the ways with gradients end, which go on with NaN
        return {"fits": True, "steps": job.steps} | dict.fromkeys(("cpu_seconds", "loss", "accuracy"), math.nan)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(text in str(error) for text in NO_MEMORY):
            return {"fits": False}
        raise


def _train(job: Job, learn: Tensor, held_out: Tensor) -> dict[str, float]:
    streamed = "offload" in job.way or "uploaded" in job.way
    with tempfile.TemporaryDirectory() as folder:
        model, zo = opened(job.base, job.shape, streamed), None
        if WAYS[job.way] == "zo":
            stream = functools.partial(BlockStream, blocks=list(model.transformer.h), make_host=mapped(folder))
            options = {"make_forward": stream} if streamed else {}
            zo = ZerothOrder(model, ZerothConfig(seed=job.seed), lr=job.lr, **options)
        step = with_gradients(model, job) if zo is None else None
        began = time.process_time()
        for tokens in batches(learn, job.batch, job.steps, job.seed + 1):
            if step is not None:
                step(tokens)
            elif zo is not None:
                zo.step(functools.partial(loss_of, tokens=tokens), len(tokens))
        if zo is not None:
            zo.finish()
        found = {"cpu_seconds": time.process_time() - began}
        resource.setrlimit(resource.RLIMIT_DATA, 2 * (resource.RLIM_INFINITY,))  # what follows is no training
        if job.evaluates and zo is not None:
            with zo.inference():
                found |= evaluate(model, held_out)
        elif job.evaluates:
            found |= evaluate(model.eval(), held_out)
        return found


def restrict(nbytes: int) -> None:
    """From here on the process may take so many bytes more of private writable memory. Small stacks and one arena, and
    whatever has been freed goes back: so that what is counted is tensors."""
    libc = ctypes.CDLL(None)
    for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 1 << 16), (M_TRIM_THRESHOLD, 1 << 16)):
        libc.mallopt(option, value)
    libc.malloc_trim(0)
    threading.stack_size(1 << 18)
    status = Path("/proc/self/status").read_text()
    now = int(status.partition("VmData:")[2].split()[0]) << 10
    libc.mallinfo2.restype = MallInfo
    free = libc.mallinfo2().fordblks  # in the heap, where it is taken before the limit counts
    resource.setrlimit(resource.RLIMIT_DATA, (now - free + nbytes, resource.RLIM_INFINITY))


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")]
    _fields_ += [(name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]
