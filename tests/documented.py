"""The code blocks of README and docs/. Their Python runs on two workers, a page's blocks one after the other."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from core import CompressionConfig
from tests.imports import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*|\{\.python\})(?: title=\"([^\"\n]*)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CRASH = 100  # the step of a loop at which it is stopped, in the midst of an epoch
NOT_BY_TIME = "config = replace(config, delay=2, compression=CompressionConfig('int4'))"  # repeats bit for bit


@dataclass(frozen=True)
class Block:
    """line: of its first line in the page. title: the file that a reader would call it; "" for a piece."""

    page: str
    line: int
    language: str
    title: str
    code: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self, names: dict[str, Any], code: str = "") -> None:
        """Runs it, or `code` in its place, with these names; a traceback has the page's lines."""
        lines = "\n" * (self.line - 1) + (code or self.code).replace("co2_training", "core")
        exec(compile(lines, str(ROOT / self.page), "exec"), names)


def blocks() -> list[Block]:
    found = []
    for path in PAGES:
        text, page = path.read_text(), path.relative_to(ROOT).as_posix()
        for fence in FENCE.finditer(text):
            line = text.count("\n", 0, fence.start()) + 2
            found.append(Block(page, line, fence[1], fence[2] or "", fence[3]))
    return found


def script(title: str) -> Block:
    return next(block for block in blocks() if block.title == title)


def readers_own(folder: str, rank: int) -> dict[str, Any]:
    """What a piece of code takes as the reader's: names of the loop, and what Start's script has imported."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
    names: dict[str, Any] = {"folder": folder, "model": model}
    optimizer = names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(rank)
    inputs = torch.randn(64, 16, 8, generator=draws)
    names["loader"] = [(x, x.sum(1, keepdim=True)) for x in inputs]
    names["data"] = TensorDataset(x := inputs.flatten(0, 1), x.sum(1, keepdim=True))
    model(inputs[0])  # as BatchNorm without data is refused by steps without gradients
    exec("from itertools import islice\nimport torch\nimport torch.distributed as dist", names)
    exec("from core import CO2, CO2Config, CO2, node_mesh\nW, N = dist.get_world_size(), 400", names)
    exec("from torch.nn.parallel import DistributedDataParallel", names)

    def loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        return (model(inputs) - targets).square().mean()

    def train_on(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        loss(model, inputs, targets).backward()
        optimizer.step()

    return names | {"loss": loss, "train_on": train_on, "evaluate": lambda model: model.eval()}


def on_cpus(code: str) -> str:
    """A page's code for nodes of 8 GPUs, for one node of two CPU workers whose process group exists."""
    code = re.sub(r"(?m)^(torch\.cuda\.set_device|dist\.init_process_group)\(.*$", "", code)
    return code.replace('node_mesh("cuda", 8)', 'node_mesh("cpu", 2)')


def run_pieces(rank: int, world_size: int, folder: str) -> None:
    """All Python of the pages but whole scripts."""
    for path in PAGES:
        page = path.relative_to(ROOT).as_posix()
        os.makedirs(f"{folder}/{path.stem}", exist_ok=True)
        names = readers_own(f"{folder}/{path.stem}", rank)
        for block in blocks():
            if block.page == page and block.language == "python" and not block.title:
                try:
                    block.run(names, on_cpus(block.code))
                except Exception as error:
                    raise AssertionError(f"{block.where} does not run") from error
        dist.barrier()


def run_diff(rank: int, world_size: int) -> Tensor:
    """README's loop, as its diff leaves it."""
    (block,) = (block for block in blocks() if block.language == "diff")
    names = readers_own("", rank)
    names["epochs"], names["loss"] = 1, lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    block.run(names, "".join(line[2:] + "\n" for line in block.code.splitlines() if line[0] != "-"))
    return torch.cat([p.detach().flatten() for p in names["model"].parameters()])


def run_resumed(rank: int, world_size: int, folder: str, which: str) -> list[tuple[Any, Tensor]]:
    """A loop with dropout undisturbed, stopped, and started again: the step it began at, and the weights.

    which: Start's whole "script", or the "loop" of the page about checkpoints.
    """
    dist.init_process_group = lambda *_: None  # it is there already
    of_page = next(block for block in blocks() if block.page == "docs/checkpoints.md")
    block, ends = script("train.py") if which == "script" else of_page, []
    changes = {
        "runs/first": "{folder}",
        "steps, tau=10)": "steps, tau=10)\n" + NOT_BY_TIME,
        "nn.ReLU()": "nn.Dropout(0.3)",
        "while step": "began = step\n{indent}while step",
        "step += 1\n": "step += 1; assert step != {crash}, 'stopped'\n",
        "step % 100": "step % 40",
        "6 * len(loader)": "2 * len(loader)",
    }
    for name, crash in (("calm", 0), ("harmed", CRASH), ("harmed", 0)):
        code, path = block.code, f"{folder}/{name}"
        indent = "    " * (which == "script")
        for old, new in changes.items():
            code = code.replace(old, new.format(folder=path, crash=crash, indent=indent))
        names: dict[str, Any] = {"replace": replace, "CompressionConfig": CompressionConfig}
        names |= readers_own(path, rank) if which == "loop" else {}
        torch.manual_seed(rank)
        try:
            block.run(names, code)
        except AssertionError as error:
            assert str(error) == "stopped" and names["step"] == CRASH
            names["co2"].leave()
        ends.append((names["began"], torch.cat([p.detach().flatten() for p in names["model"].parameters()])))
        dist.barrier()
    return ends
