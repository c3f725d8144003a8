"""The peers that torch brings, on real processes, against sums by hand; and the bench's own loop and command.

One start of two workers serves all tests but the command's: starting takes longer than all that they do.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.peers import loop
from bench.peers.adapters import PEERS, Task
from bench.peers.loop import BATCH, Job
from bench.standin import LR, MOMENTUM, build_model
from bench.trainings import split_wire
from core.testing import run_distributed
from core.wires.formats import nbytes
from core.wires.quantized import chunk_of
from tests.bench.emulated import python
from vision import data

STEPS, TAU = 7, 3


def linear(size: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(size, size, bias=False))


def gradient(rank: int, step: int, terms: int = 1, size: int = 8) -> Tensor:
    """[size, size], of rank `terms`, different on every worker; the right factors are the same on all."""
    left = torch.randn(terms, size, generator=torch.Generator().manual_seed(100 * rank + step))
    right = torch.randn(terms, size, generator=torch.Generator().manual_seed(7))
    return left.t() @ right


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def post_local(rank: int, _: int) -> tuple[Tensor, int]:
    task = Task(linear(), sgd, TAU, 1, STEPS, 30.0)
    trainer = PEERS["torch_post_local"].start(task)
    for step in range(STEPS):
        task.model[0].weight.grad = gradient(rank, step)
        trainer.optimizer.step()
    return task.model[0].weight.detach(), trainer.rounds()


def test_post_local_sgd_averages_every_tau_steps():
    """After steps 1, 4 and 7."""
    workers = [linear()[0].weight.detach().clone() for _ in range(2)]
    for step in range(STEPS):
        workers = [w - 0.1 * gradient(rank, step) for rank, w in enumerate(workers)]
        if step % TAU == 0:
            workers = [(workers[0] + workers[1]) / 2] * 2
    for (weight, rounds), expected in zip(on_ranks()["post_local"], workers, strict=True):
        torch.testing.assert_close(weight, expected)
        assert rounds == 3


def power(rank: int, _: int, terms: int) -> Tensor:
    task = Task(linear(), sgd, TAU, 1, STEPS, 30.0)
    trainer = PEERS["torch_powersgd"].start(task)
    for step in range(STEPS):
        wanted = gradient(rank, step, terms)
        (trainer.model(torch.eye(8)) * wanted.t()).sum().backward()  # so that the weight's gradient is `wanted`
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return task.model[0].weight.detach()


@pytest.mark.parametrize("terms", [1, 3])
def test_powersgd_is_exact_for_gradients_of_its_rank(terms: int):
    """Gradients of rank 3 lose something at once, and both workers lose the same."""
    expected = linear()[0].weight.detach().clone()
    for step in range(STEPS):
        expected -= 0.1 * (gradient(0, step, terms) + gradient(1, step, terms)) / 2
    first, second = on_ranks()[f"power {terms}"]
    torch.testing.assert_close(first, second)
    error = (first - expected).abs().max().item()
    assert error < 1e-5 if terms == 1 else error > 1e-3


# -- the loop ---------------------------------------------------------------------------------------------------


def job(method: str, folder: Path) -> Job:
    return Job(method, 5, 2, 2, 16, 0.0, 3, 30.0, None, None, folder, folder)


def trained(rank: int, _: int, method: str, folder: Path) -> dict:
    return loop.run(job(method, folder), *data.digits())


def two_workers_by_hand(average_every: int) -> list[float]:
    """Losses of the mean model after steps 0, 2, 4, 5 of two workers that average now and then (0: never)."""
    train, test = data.digits()
    torch.manual_seed(3)
    models = [build_model(16), build_model(16)]
    models[1].load_state_dict(models[0].state_dict())
    mean = build_model(16)
    optimizers = [torch.optim.SGD(m.parameters(), LR, MOMENTUM) for m in models]
    batches = [loop.batches(job("none", Path()), train, rank) for rank in range(2)]
    losses = []
    for step in range(6):
        if step:
            for model, optimizer, (x, y) in zip(models, optimizers, map(next, batches), strict=True):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        with torch.no_grad():
            for m, a, b in zip(mean.parameters(), *(model.parameters() for model in models), strict=True):
                m.copy_((a + b) / 2)
                if average_every and step % average_every == 0:
                    a.copy_(m)
                    b.copy_(m)
            if step in (0, 2, 4, 5):
                losses.append(F.cross_entropy(mean(test.normalise(test.images[1::2])), test.labels[1::2]).item())
    return losses


@pytest.mark.parametrize(("method", "rounds"), [("none", 0), ("local", 3)])
def test_the_loop_against_two_workers_by_hand(method: str, rounds: int):
    """finish() adds a third round to the two of five steps with tau 2, and every round sends the model once."""
    first, second = on_ranks()[method]
    assert first["losses"] == pytest.approx(two_workers_by_hand(2 if method == "local" else 0), rel=1e-4)
    assert list(first["times"]) == list(second["times"]) == [0, 2, 4, 5]
    assert first["rounds"] == rounds and "losses" not in second
    if method == "local":
        parameters = sum(p.numel() for p in build_model(16).parameters())
        assert first["sent"] == pytest.approx(3 * 4 * parameters, rel=0.01)  # 2 (n - 1) / n = 1; 4 bytes each


@pytest.mark.parametrize(("method", "rounds"), [("dpu", 4), ("acco", 9), ("diloco", 3)])
def test_the_loop_drives_the_rows_without_a_package(method: str, rounds: int):
    first, second = on_ranks()[method]
    assert first["rounds"] == second["rounds"] == rounds
    assert first["losses"][-1] < first["losses"][0]
    parameters = sum(p.numel() for p in build_model(16).parameters())
    assert first["sent"] == pytest.approx(rounds * 4 * parameters, rel=0.01)


@pytest.mark.parametrize(("method", "rounds"), [("ddp:wire=int8", 5), ("local:wire=int4", 3), ("diloco:wire=int4", 3)])
def test_a_row_over_a_narrow_format_sends_so_much_less(method: str, rounds: int):
    first, _ = on_ranks()[method]
    numel = sum(p.numel() for p in build_model(16).parameters())
    wire = split_wire(method)[1]
    assert first["rounds"] == rounds and first["losses"][-1] < first["losses"][0]
    assert first["sent"] == pytest.approx(
        rounds * 2 * nbytes(wire, chunk_of(numel, 2)), rel=0.05
    )  # out, and their mean


def everything(rank: int, _: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"post_local": post_local(rank, 2)}
    found |= {f"power {terms}": power(rank, 2, terms) for terms in (1, 3)}
    for method in ("none", "local", "dpu", "acco", "diloco", "ddp:wire=int8", "local:wire=int4", "diloco:wire=int4"):
        (folder / method).mkdir(exist_ok=True)
        found[method] = trained(rank, 2, method, folder / method)
    return found


@functools.cache
def on_ranks() -> dict[str, tuple[Any, Any]]:
    """What each worker found, by name."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_distributed(everything, 2, Path(folder))
    return {name: (first[name], second[name]) for name in first}


# -- the command ------------------------------------------------------------------------------------------------


def bench(folder: Path, *options: str) -> tuple[str, dict]:
    fixed = [
        "--workers",
        "2",
        "--repeats",
        "1",
        "--steps",
        "6",
        "--tau",
        "2",
        "--step_ms",
        "0",
        "--width",
        "16",
        "--out",
    ]
    said = python("-m", "bench.peers", *fixed, folder, *options, timeout=100)
    assert (folder / "peers.md").read_text().strip() in said
    return said, json.loads((folder / "peers.json").read_text())


@pytest.mark.slow
def test_the_command_with_a_throttled_link(tmp_path: Path):
    """co2 sends the model after steps 2, 4 and 6, the last; torch's peers are refused."""
    out, result = bench(tmp_path, "--throttle", "--rate", "1", "--methods", "co2", "torch_powersgd")
    none, co2, refused = result["rows"]
    assert "throttled in software to 1 Mbit/s" in out
    assert "cannot hold back" in refused["reason"] and "| torch_powersgd | not run: " in out
    parameters = sum(p.numel() for p in build_model(16).parameters())
    sent = co2["bytes_per_sample"][0] * 6 * BATCH
    assert co2["rounds"] == [3] and sent == pytest.approx(3 * 4 * parameters, rel=0.01)
    assert result["runs"][1]["seconds"] > 0.95 * sent * 8 / 1e6  # what the link takes
    assert none["bytes_per_sample"] == [0.0]


@pytest.mark.root
def test_the_command_over_namespaces(tmp_path: Path):
    """Bytes are those of the interface: with headers, above the model's in every one of post-local SGD's rounds."""
    out, result = bench(tmp_path, "--rate", "20", "--methods", "torch_post_local", "torch_powersgd", "local")
    parameters = sum(p.numel() for p in build_model(16).parameters())
    _, post, power_sgd, local = result["rows"]
    assert "20 Mbit/s between network namespaces of one machine (measured" in out
    for row, rounds in ((post, 3), (local, 3)):
        sent = row["bytes_per_sample"][0] * 6 * BATCH
        assert row["rounds"] == [rounds] and 4 * rounds * parameters < sent < 4 * rounds * parameters + 40_000
    assert "reason" not in power_sgd
