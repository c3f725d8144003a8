"""CO2Training in a loop of the real accelerate, against the plain loop: bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from core import CO2Config, UserError
from tests.integrations import plain
from tests.integrations.plain import BATCH, EPOCHS, PAPER, Factor, Inner, Net
from tests.integrations.ranks import ranks
from tests.on_ranks import alike, on_ranks, total_world_size

LIBRARY = ["accelerate", "core.integrations.accelerate", "torch.utils.tensorboard"]


def accelerator_of(log: str, **settings: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # which allows one precision a process
    accelerator = Accelerator(**settings, **(dict(log_with="tensorboard", project_dir=log) if log else {}))
    if log:
        accelerator.init_trackers("run")
    return accelerator


def loop(config: CO2Config | None = PAPER, *, seed: int = 0, micro: int = 1, precision: str = "no", **how: Any) -> Any:
    """Everything after each update, after the last one behind the block; and what `train` returns. how: see there."""
    from core.integrations.accelerate import CO2Training

    accelerator = accelerator_of(how.get("log", ""), gradient_accumulation_steps=micro, mixed_precision=precision)
    model = Net(seed)
    order, loading = how.pop("shuffle", False), how.pop("loading", 0)
    data = DataLoader(TensorDataset(*plain.examples()), batch_size=BATCH, shuffle=order, num_workers=loading)
    optimizer, loader = accelerator.prepare(plain.adam(model), data)
    trace: list[Tensor] = []
    with CO2Training(accelerator, model, optimizer, config) as co2:
        assert co2.config == (config or CO2Config.recommended())
        boundaries = train(accelerator, model, optimizer, loader, co2, trace, **how)
    for tracker in accelerator.trackers:  # end_training() would destroy the process group, too
        tracker.finish()
    return [*trace[:-1], plain.everything(model)], boundaries


def train(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    co2: Any,
    trace: list[Tensor],
    *,
    epochs: int = EPOCHS,
    clip: float = 0.0,
    save: dict[int, str] | None = None,
    resume: tuple[int, str] = (0, ""),
    stepped: Any = None,
    log: str = "",
    looks: bool = True,
) -> list[tuple[int, bool, Tensor]]:
    """Of each boundary the batch, whether sync_for_eval() says that workers are alike, and everything. save: batch ->
    folder. resume: a batch, and the folder that was written behind it. stepped: called with the number of updates.
    looks: whether there is something of boundaries, where sync_for_eval() may merge."""
    boundaries = []
    if resume[1]:
        accelerator.load_state(resume[1])
    every = (batch for _ in range(epochs) for batch in loader)
    for number, (x, y) in enumerate(every, 1):
        if number <= resume[0]:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            closed = co2.step(last=number == epochs * len(loader))
        if not accelerator.sync_gradients:
            assert not closed
            continue
        if stepped:
            stepped(len(trace) + 1)
        if co2.at_boundary and looks:
            boundaries.append((number, co2.sync_for_eval(), plain.everything(model)))
            told = co2.metrics()  # after sync_for_eval(), which may have merged the mean of the next round
            assert told["co2/local_steps"] > 0 and told["co2/boundary_seconds"] > 0
            accelerator.log(told, step=number)
        if save and number in save:
            accelerator.save_state(save[number])
        trace.append(plain.everything(model))
    return boundaries


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks(through=ranks)
def test_trains_as_the_plain_loop_and_goes_on_from_checkpoints(rank: int, workers: int, tmp_path: Path) -> None:
    batches, folder = plain.in_turn(rank, workers), str(tmp_path)
    saved = {15: f"{folder}/15", 18: f"{folder}/18"} if workers == 2 else {}
    whole, boundaries = loop(save=saved, log=folder, stepped=lambda step: plain.go_apart(folder, rank, step))
    plain.assert_equal(whole, plain.train(batches, meets=saved))
    for step, path in saved.items():  # at a boundary, and in mid-round; from other weights
        later = {other: f"{folder}/again" for other in saved if other > step}
        plain.assert_equal(loop(seed=7 + rank, resume=(step, path), save=later)[0], whole[step:])
        written = load_file(f"{path}/model.safetensors")
        assert torch.equal(plain.everything_in(written), whole[step - 1]), "rank 0's file is not of the one model"
    if workers == 2:
        how: dict[str, Any] = {"micro": 2, "clip": 0.5}
        own = how | {"precision": "bf16", "looks": False}
        ours, _ = loop(plain.FRAGMENTS, save={16: f"{folder}/cut"}, **own)  # update 8 of 18
        plain.assert_equal(ours, plain.train(batches, plain.FRAGMENTS, meets=[8], dtype=torch.bfloat16, **how))
        again, _ = loop(plain.FRAGMENTS, seed=7 + rank, resume=(16, f"{folder}/cut"), **own)
        plain.assert_equal(again, ours[8:])
    steps = [step for step, _, _ in boundaries]
    assert (
        all(same for _, same, _ in boundaries)
        and total_world_size(steps) == [steps] * workers
        and steps[:3] == [5, 10, 15]
    )
    assert rank or plain.tags(tmp_path) >= {"co2/round", "co2/exposed_seconds"}


@pytest.mark.slow
@on_ranks(2, through=ranks)
def test_recommended_settings_run(rank: int) -> None:
    trace, boundaries = loop(None, epochs=20, shuffle=True)
    assert alike(trace[-1]) and len(boundaries) > 2
    for step, same, model in boundaries:
        assert total_world_size((step, same)) == [(step, same)] * 2 and (not same or alike(model))


def test_alone_without_a_process_group() -> None:
    trace, _ = loop()
    plain.assert_equal(trace, plain.train(plain.in_turn(0, 1)))


def test_mistakes_get_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from core.integrations.accelerate import CO2Training

    accelerator: Any = Accelerator()
    net = Net()
    optimizer = accelerator.prepare(plain.adam(net))
    with pytest.raises(UserError, match="CO2Training: the optimizer is a bare AdamW"):
        CO2Training(accelerator, net, plain.adam(net))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="CO2Training: 1 is SyncBatchNorm"):
        CO2Training(accelerator, nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), optimizer)
    monkeypatch.setattr(type(accelerator), "distributed_type", DistributedType("FSDP"))
    with pytest.raises(UserError, match="distributed_type=FSDP: choose plain"):
        CO2Training(accelerator, net, optimizer)


def test_what_accelerate_cannot_load_is_refused(tmp_path: Path) -> None:
    from core.integrations.accelerate import CO2Training

    accelerator, model = accelerator_of(""), Net()
    bare = plain.adam(model)
    optimizer, _ = accelerator.prepare(bare, torch.optim.lr_scheduler.LambdaLR(bare, Factor(Inner())))
    name = plain.INNER
    with CO2Training(accelerator, model, optimizer):
        with pytest.raises(UserError, match=f"^CO2Training: schedule0.lr_lambdas.0.inner is a {name}.*\\[{name}\\]"):
            accelerator.save_state(str(tmp_path))
        assert not [*tmp_path.iterdir()]
        with torch.serialization.safe_globals([Inner]):
            accelerator.save_state(str(tmp_path))
            accelerator.load_state(str(tmp_path))


@on_ranks(2, through=ranks)
def test_sigterm_to_all_processes_of_a_node_reaches_only_the_loops_handler(rank: int) -> None:
    with plain.hears_sigterm() as heard:
        trace, _ = loop(loading=2, stepped=lambda step: plain.terminate_node() if step == 7 else None)
    assert len(heard) == 1
    plain.assert_equal(trace, plain.train(plain.in_turn(rank, 2)))


def test_dispatched_batches_are_refused() -> None:
    from accelerate.utils import DataLoaderConfiguration

    from core.integrations.accelerate import CO2Training

    accelerator, model = accelerator_of("", dataloader_config=DataLoaderConfiguration(dispatch_batches=True)), Net()
    optimizer, loader = accelerator.prepare(plain.adam(model), DataLoader(TensorDataset(*plain.examples()), 24))
    with CO2Training(accelerator, model, optimizer) as co2:
        for _ in loader:
            with pytest.raises(UserError, match="^CO2Training: dispatch_batches=True: .* in DataLoaderConfiguration$"):
                co2.step()


def test_after_an_exception_saving_is_accelerates_own_again(tmp_path: Path) -> None:
    from core.integrations.accelerate import CO2Training

    accelerator, model = accelerator_of(""), Net()
    optimizer = accelerator.prepare(plain.adam(model))
    with pytest.raises(KeyError), CO2Training(accelerator, model, optimizer):
        raise KeyError("deliberate")
    accelerator.save_state(str(tmp_path))
    assert not (tmp_path / "co2").exists()
    accelerator.load_state(str(tmp_path))


def test_checkpoints_with_and_without_co2_have_the_same_files_of_accelerate(tmp_path: Path) -> None:
    from core.integrations.accelerate import CO2Training

    own, model = accelerator_of(""), Net()
    optimizer = own.prepare(plain.adam(model))
    other, bare = accelerator_of(""), Net(seed=1)
    other.prepare(bare, plain.adam(bare))
    other.save_state(f"{tmp_path}/without")
    expected = plain.everything(model)
    without = pytest.raises(UserError, match="without/co2 is missing, as when a run without CO2 saved")
    with without, CO2Training(own, model, optimizer):
        own.save_state(f"{tmp_path}/with")
        own.load_state(f"{tmp_path}/without")
    other.load_state(f"{tmp_path}/with")
    assert torch.equal(plain.everything(bare), expected)
