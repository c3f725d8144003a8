"""CO2Hook in mmengine's Runner, with accumulated gradients, an EMAHook and a save after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from core.groups import of_all
from tests.integrations import plain
from tests.integrations.ranks import ranks
from tests.on_ranks import on_ranks

LIBRARY = ["distutils.errors", "mmengine.runner", "core.integrations.mmengine"]
SAVED = 4  # iterations; gradients are accumulated over three
FRAGMENTS = {"merge": "keep_local", "delay": 1, "gap": "none", "fragments": 2}


def built(rank: int, folder: Path, probe: Any, loading: int = 0) -> Any:
    from mmengine.hooks import EMAHook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    from core.integrations.mmengine import CO2Hook

    class Toy(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.line = nn.Linear(2, 1)

        def forward(self, inputs: Tensor, mode: str = "tensor") -> Any:
            loss = self.line(inputs).square().mean()
            return {"loss": loss} if mode == "loss" else loss

    data = [{"inputs": torch.full((2,), 1.0 + rank + i)} for i in range(8)]
    return Runner(
        Toy(),
        str(folder),
        train_dataloader=DataLoader(data, batch_size=1, num_workers=loading),  # type: ignore[arg-type]
        train_cfg={"by_epoch": False, "max_iters": 8},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01}, "accumulative_counts": 3},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": SAVED}, "logger": None},
        custom_hooks=[CO2Hook(tau=2, co2=FRAGMENTS), EMAHook(momentum=0.5), probe],
        log_level="ERROR",
    )


@on_ranks(2, through=ranks)
def test_a_checkpoint_amid_accumulation_and_the_ema_are_of_one_model(rank: int, tmp_path: Path) -> None:
    from mmengine.hooks import EMAHook, Hook

    apart, ended = [], []

    class Probe(Hook):
        priority = "VERY_LOW"

        def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
            ema = next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model.module
            found = of_all([model.line.weight.flatten().tolist() for model in (runner.model, ema)])
            (ended if runner.iter + 1 in (SAVED, 8) else apart).append(found[0] == found[1])

    runner = built(rank, tmp_path, Probe())
    runner.train()
    assert ended == [True, True] and not all(apart), "the workers take their own steps in between"
    runner.save_checkpoint(str(tmp_path), "final.pth")
    if rank == 0:
        assert "co2" in torch.load(tmp_path / f"iter_{SAVED}.pth", weights_only=False)
        assert "co2" not in torch.load(tmp_path / "final.pth", weights_only=False)


@on_ranks(2, through=ranks)
def test_sigterm_to_all_processes_of_a_node_reaches_only_a_handler(rank: int, tmp_path: Path) -> None:
    from mmengine.hooks import Hook

    class Probe(Hook):
        def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
            if runner.iter == 1:
                plain.terminate_node()

    runner = built(rank, tmp_path, Probe(), loading=2)
    with plain.hears_sigterm() as heard:
        runner.train()
    assert len(heard) == 1 and runner.iter == 8
