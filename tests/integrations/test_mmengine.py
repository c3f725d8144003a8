"""CO2Hook in mmengine's Runner: rounds and settings, checkpoints, accumulated gradients, an EMAHook, and mistakes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from core import CO2Config, UserError
from tests.integrations import plain
from tests.integrations.ranks import ranks
from tests.on_ranks import alike, on_ranks
from tests.problems import flat

# isort: split
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from mmengine.registry import DefaultScope
from mmengine.runner import Runner

from core.integrations.mmengine import CO2Hook

LIBRARY = ["distutils.errors"]  # which each of mmengine's runners asks for
SAVED, STEPS = 4, 8  # iterations
SAVES = {"type": "CheckpointHook", "by_epoch": False, "interval": SAVED}
FRAGMENTS = {"merge": "keep_local", "delay": 1, "gap": "none", "fragments": 2}
# as in other projects' runs of several workers; mmengine's default wrapper asks for a GPU
DDP_ON_CPU = {"type": "MMDistributedDataParallel", "device_ids": None, "broadcast_buffers": False}
WRAPPED = {"launcher": "pytorch", "cfg": {"model_wrapper_cfg": DDP_ON_CPU}}


class Toy(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def forward(self, inputs: Tensor, mode: str = "tensor") -> Any:
        loss = (self.layers(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        return {"loss": loss} if mode == "loss" else loss


class Probe(Hook):
    """Notes the parameters after every iteration, when all other hooks have run, and what CO2Hook has built."""

    priority = "LOWEST"

    def __init__(self, then: Callable[[Runner], None] = lambda _: None) -> None:
        self.then, self.seen, self.averages = then, list[Tensor](), list[Tensor]()

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        hooks: dict[Any, Any] = {type(hook): hook for hook in runner.hooks}
        self.seen.append(flat(runner.model.parameters()))
        self.built, self.wrapped = hooks[CO2Hook].co2, hasattr(runner.model, "module")
        if EMAHook in hooks:
            self.averages.append(flat(hooks[EMAHook].ema_model.module.parameters()))
        self.then(runner)


def built(rank: int, folder: Path, *hooks: Hook, steps: int = STEPS, loading: int = 0, **changes: Any) -> Runner:
    # as many as STEPS need: behind the last one mmengine would sleep for two seconds
    data = [{"inputs": torch.tensor([(1.0 + rank + i) / 8, i % 3 - 1.0])} for i in range(2 * STEPS)]
    config: dict[str, Any] = {
        "work_dir": str(folder),
        "train_dataloader": DataLoader(data, batch_size=2, num_workers=loading),  # type: ignore[arg-type]
        "train_cfg": {"by_epoch": False, "max_iters": steps},
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.01}},
        "default_hooks": {
            "checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": SAVED},
            "logger": None,
        },
        "custom_hooks": [*hooks],
        "experiment_name": folder.name,  # two of a second would share their logs
        "log_level": "ERROR",
    }
    return Runner(Toy(), **(config | changes))


@on_ranks(2, through=ranks)
def test_workers_train_apart_meet_at_round_ends_and_a_resumed_run_ends_as_the_whole_one(rank: int, tmp_path: Path):
    settings, whole, again, slow = {"outer_lr": 0.5, "gap": "norm", "clip": 0.5}, Probe(), Probe(), Probe()
    model = built(rank, tmp_path / "whole", CO2Hook(tau=3, co2=settings), whole, **WRAPPED).train()
    # rounds end at 3 and, counted anew after the checkpoint at 4, at 7; 4 and 8 are checkpoints
    assert [alike(each) for each in whole.seen] == [False, False, True, True, False, False, True, True]
    assert whole.built.config == CO2Config(tau=3, **settings) and not whole.wrapped
    assert alike(*model.parameters(), *model.buffers())
    resume: dict[str, Any] = WRAPPED | {"load_from": f"{tmp_path}/whole/iter_{SAVED}.pth", "resume": True}
    built(rank, tmp_path / "again", CO2Hook(tau=3, co2=settings), again, **resume).train()
    torch.testing.assert_close(again.seen, whole.seen[SAVED:], rtol=0, atol=1e-6)
    assert not torch.allclose(again.seen[-1], whole.seen[SAVED - 1], rtol=0, atol=1e-6)
    other = CO2Hook("slowmo", tau=2, slowmo={"outer_momentum": 0.3})
    built(rank, tmp_path / "slowmo", other, slow, steps=3, **WRAPPED).train()
    assert alike(slow.seen[-1]) and not alike(slow.seen[0]) and slow.built.config.outer_momentum == 0.3


@on_ranks(2, through=ranks)
def test_a_checkpoint_amid_accumulation_and_the_ema_are_of_one_model(rank: int, tmp_path: Path) -> None:
    optim, probe = {"optimizer": {"type": "SGD", "lr": 0.01}, "accumulative_counts": 3}, Probe()
    hooks = CO2Hook(tau=2, co2=FRAGMENTS), EMAHook(momentum=0.5), probe
    runner = built(rank, tmp_path / "run", *hooks, optim_wrapper=optim)
    runner.train()
    same = [alike(*pair) for pair in zip(probe.seen, probe.averages, strict=True)]
    assert same.pop(STEPS - 1) and same.pop(SAVED - 1) and not all(same), "the workers take their own steps in between"
    runner.save_checkpoint(str(tmp_path / "run"), "final.pth")
    if rank == 0:
        assert "co2" in torch.load(tmp_path / f"run/iter_{SAVED}.pth", weights_only=False)
        assert "co2" not in torch.load(tmp_path / "run/final.pth", weights_only=False)


@on_ranks(2, through=ranks)
def test_sigterm_to_all_processes_of_a_node_reaches_only_a_handler(rank: int, tmp_path: Path) -> None:
    def terminate(runner: Runner) -> None:
        if runner.iter == 1:
            plain.terminate_node()

    runner = built(rank, tmp_path / "run", CO2Hook(tau=2, co2=FRAGMENTS), Probe(terminate), loading=2)
    with plain.hears_sigterm() as heard:
        runner.train()
    assert len(heard) == 1 and runner.iter == STEPS


def test_the_checkpoint_holds_the_outer_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, no process group: the hook works there too, and its checkpoint resumes only its own method."""
    monkeypatch.setattr(DefaultScope, "_instance_dict", OrderedDict())  # mmseg's tests in this process have another
    built(0, tmp_path / "one", CO2Hook(tau=2), steps=4).train()
    path = tmp_path / "one" / "iter_4.pth"
    saved = torch.load(path, weights_only=False)["co2"]
    assert saved["name"] == "co2" and saved["state"]["rank0"]["rounds"] >= 2
    local, load = CO2Hook("local", tau=2), {"load_from": str(path)}
    with pytest.raises(UserError, match="trained with co2, not local"):
        built(0, tmp_path / "other", local, resume=True, **load).train()
    built(0, tmp_path / "tuned", CO2Hook("local", tau=2), steps=4, **load).train()


MISTAKES: dict[str, dict[str, Any]] = {
    "method='ddp': choose co2": {"method": "ddp"},
    "co2 has no setting 'outer_rl': it has .*outer_lr, outer_momentum": {"co2": {"outer_rl": 1.0}},
    "slowmo has no setting 'clip': it has outer_lr, outer": {"method": "slowmo", "slowmo": {"clip": 1.0}},
    "compression has no setting 'bits'": {"co2": {"compression": {"bits": 8}}},
    "co2.compression='int8': give a dict": {"co2": {"compression": "int8"}},
    "tau=0": {"tau": 0},
    "mesh=: the model is bare here": {"mesh": object()},
}


def test_mistakes_get_one_line() -> None:
    for message, settings in MISTAKES.items():
        with pytest.raises(UserError, match=message):
            CO2Hook(**settings)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4))
    with pytest.raises(UserError, match="1 is SyncBatchNorm"):
        CO2Hook().before_run(SimpleNamespace(model=model))  # type: ignore[arg-type]
