"""CO2Strategy in the real Lightning Trainer, against the plain loop: bit for bit."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from core import CO2Config, UserError
from tests.integrations import plain
from tests.integrations.plain import BATCH, EPOCHS, PAPER, Factor, Inner, Net
from tests.integrations.ranks import ranks
from tests.on_ranks import alike, on_ranks

LIBRARY = ["lightning.pytorch", "core.integrations.lightning"]


class Resumable(DataLoader):
    """Lightning asks its state, for it does not skip batches itself."""

    taken = skipped = 0

    def __iter__(self) -> Any:
        skipped, self.skipped = self.skipped, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= skipped:
                self.taken = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["taken"] % len(self)


def module_of(net: nn.Module, factor: Factor | None = None) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = plain.adam(self.net)
            schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor)] if factor else []
            return [optimizer], [{"scheduler": schedule, "interval": "step"} for schedule in schedules]

    return Module()


def watcher(strategy: Any, after_batch: Any) -> Any:
    from lightning.pytorch import Callback

    class Watch(Callback):
        def __init__(self) -> None:
            self.begun, self.config = False, None
            self.trace: list[Tensor] = []
            self.validated: list[tuple[int, bool, Tensor]] = []
            self.losses: list[float] = []

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            """What the batch before has left, with a validation and a checkpoint behind it."""
            if self.begun:
                self.trace.append(plain.everything(module))
            self.begun = True

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if after_batch:
                after_batch(trainer, strategy)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.trace.append(plain.everything(module))
            self.config = strategy.co2.config

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking and strategy.co2 is not None:
                self.losses.append(float(trainer.callback_metrics["val_loss"]))
                self.validated.append((trainer.global_step, strategy.co2.at_boundary, plain.everything(module)))

    return Watch()


def run(
    folder, config=PAPER, *, net=None, resume="", validated="", after_batch=None, loading=0, factor=None, **changes
) -> Any:
    """Trains; a dictionary of what is looked at."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from core.integrations.lightning import CO2Strategy

    strategy = CO2Strategy(config)
    watch = watcher(strategy, after_batch)
    settings: dict[str, Any] = dict(accelerator="cpu", devices=1, max_epochs=EPOCHS, enable_progress_bar=False)
    settings |= dict(enable_checkpointing=False, enable_model_summary=False, log_every_n_steps=1)
    settings |= dict(logger=CSVLogger(folder, "csv", "") if changes.pop("csv", False) else False)
    callbacks = [watch, *changes.pop("callbacks", ())]
    trainer = Trainer(strategy=strategy, default_root_dir=folder, callbacks=callbacks, **(settings | changes))
    module, data = module_of(net or Net(), factor), TensorDataset(*plain.examples())
    train, val = (
        Resumable(data, batch_size=BATCH, num_workers=loading, generator=torch.Generator()),
        DataLoader(data, batch_size=16),
    )
    stopped = False
    if validated:
        trainer.validate(module, val, ckpt_path=validated)
        watch.validated.clear()
    try:
        validation = val if trainer.limit_val_batches else None
        trainer.fit(module, train, validation, ckpt_path=resume or None)
    except SIGTERMException:
        stopped = True
    assert strategy.co2 is None
    seen = {"trace": watch.trace, "validated": watch.validated, "losses": watch.losses, "end": plain.everything(module)}
    return seen | {
        "config": watch.config,
        "stopped": stopped,
        "steps": trainer.global_step,
        "model": type(strategy.model).__name__,
    }


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
@on_ranks(through=ranks)
def test_trains_as_the_plain_loop(rank: int, workers: int, tmp_path: Path) -> None:
    """Our reading of the paper's rule; accumulation with a clipped norm; a last step that is no epoch's end; an EMA."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    batches, quiet = plain.shuffled(rank, workers), {"limit_val_batches": 0, "devices": workers}
    own = run(str(tmp_path), **quiet)
    plain.assert_equal(own["trace"], plain.train(batches, asks=["stop", "requeue"]))
    if workers == 2:
        other = run(str(tmp_path), accumulate_grad_batches=3, gradient_clip_val=0.5, **quiet)
        plain.assert_equal(other["trace"][2::3], plain.train(batches, micro=3, clip=0.5))
        other = run(str(tmp_path), plain.FRAGMENTS, max_steps=9, **quiet)
        plain.assert_equal(other["trace"], plain.train(batches, plain.FRAGMENTS, updates=9, asks=["stop", "requeue"]))
        average = EMAWeightAveraging(decay=0.5)  # its model is the one at the end
        averaged = run(str(tmp_path), callbacks=[average], max_steps=7, **quiet)["end"]
        assert alike(averaged)
    assert own["model"] == "Module"


VALIDATED, SAVED, CALLED = [8, 20, 32], [8, 16, 24, 32], 13  # within rounds, but for 13


def saving(folder: str, step: int = CALLED) -> Any:
    def save(trainer: Any, strategy: Any) -> None:
        if trainer.global_step == step:
            trainer.save_checkpoint(f"{folder}/mid.ckpt")

    return save


def held_run(rank: int, workers: int, folder: str) -> Any:
    """Validations, and checkpoints of ModelCheckpoint and of a call; then runs go on from these."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    files = ModelCheckpoint(f"{folder}/files", "{step}", every_n_train_steps=8, save_top_k=-1, save_last="link")
    asked: dict[str, Any] = dict(val_check_interval=8, devices=workers, enable_checkpointing=True)
    whole = run(folder, after_batch=saving(folder), callbacks=[files], csv=True, **asked)
    meets = {*VALIDATED, *SAVED, CALLED}
    plain.assert_equal(whole["trace"], plain.train(plain.shuffled(rank, workers), meets=meets))
    for step, path in ((24, "files/step=24.ckpt"), (CALLED, "mid.ckpt"), (32, "files/last.ckpt")):
        # other weights: all must come from the checkpoint
        files = ModelCheckpoint(f"{folder}/{step}/files", every_n_train_steps=8, save_top_k=-1)
        again = run(f"{folder}/{step}", net=Net(7 + rank), resume=f"{folder}/{path}", callbacks=[files], **asked)
        plain.assert_equal([*again["trace"], again["end"]], [*whole["trace"][step:], whole["end"]])
    written = torch.load(f"{folder}/files/step=16.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(plain.everything_in(written), whole["trace"][15]), "rank 0's file is not of the one model"
    return whole["validated"]


def test_validations_and_checkpoints_are_of_one_model(tmp_path: Path) -> None:
    first, second = ranks(held_run, 2, str(tmp_path))
    for a, b in zip(first, second, strict=True):
        assert a[:2] == b[:2] and a[1] and torch.equal(a[2], b[2]), "workers validated unlike models"
    assert [step for step, _, _ in first] == VALIDATED
    files = {path.name for path in (tmp_path / "files").iterdir()}
    assert files == {f"step={n}.ckpt" for n in SAVED} | {f"step={n}.ckpt.co2" for n in SAVED} | {"last.ckpt"}
    rows = list(csv.DictReader((tmp_path / "csv" / "metrics.csv").open()))
    landed = [float(row["co2/round"]) for row in rows if float(row.get("co2/allreduce_seconds") or 0)]
    assert landed == sorted(set(landed)) and len(landed) >= 7, "nothing has landed in a first round"
    assert all(row["co2/tau"] and row["co2/exposed_seconds"] for row in rows if row.get("co2/round"))
    assert all(float(row["co2/boundary_seconds"]) > 0 for row in rows if row.get("co2/round"))


@on_ranks(2, through=ranks)
def test_training_resumes_only_from_the_checkpoint_that_fit_is_given(rank: int, tmp_path: Path) -> None:  # noqa: ARG001
    """Training after a validation of a checkpoint starts anew, and so does training after the learning rate finder."""
    from lightning.pytorch.callbacks import LearningRateFinder

    folder = str(tmp_path)

    quiet = {"limit_val_batches": 0, "devices": 2}
    whole = run(folder, after_batch=saving(folder), **quiet)
    weights = torch.load(f"{folder}/mid.ckpt", weights_only=True)["state_dict"]
    net = Net(7)
    net.load_state_dict({name.removeprefix("net."): value for name, value in weights.items()})
    fresh = run(f"{folder}/fresh", net=net, **quiet)
    again = run(f"{folder}/again", net=Net(8), validated=f"{folder}/mid.ckpt", devices=2)
    plain.assert_equal(again["trace"][:11], fresh["trace"][:11])  # up to the first epoch's validation
    assert again["steps"] == whole["steps"]
    finder = LearningRateFinder(num_training_steps=7, update_attr=False)
    found = run(f"{folder}/found", callbacks=[finder], **quiet)
    assert found["steps"] == whole["steps"]
    plain.assert_equal(found["trace"][-len(whole["trace"]) :][:12], whole["trace"][:12])  # later ones: other batches


def stopping(rank: int, workers: int, folder: str) -> Any:
    """Training stops early; the recommended settings, to the end."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    asked: dict[str, Any] = dict(val_check_interval=2, devices=workers, max_epochs=20)
    early = run(folder, callbacks=[EarlyStopping("val_loss", patience=2, min_delta=9.0)], **asked)
    best = ModelCheckpoint(f"{folder}/best", "{step}", monitor="val_loss")
    recommended = run(folder, None, callbacks=[best], enable_checkpointing=True, **asked)
    assert recommended["config"] == CO2Config.recommended(steps=240)
    return early, recommended


@pytest.mark.slow
def test_stops_early_and_runs_as_recommended(tmp_path: Path) -> None:
    first, second = ranks(stopping, 2, str(tmp_path))
    for a, b in zip(first, second, strict=True):
        assert a["steps"] == b["steps"]
        assert [seen[:2] for seen in a["validated"]] == [seen[:2] for seen in b["validated"]]
        assert all(torch.equal(x[2], y[2]) for x, y in zip(a["validated"], b["validated"], strict=True))
    early, recommended = first
    assert torch.equal(early["end"], second[0]["end"]) and early["steps"] == 6 and not early["stopped"]
    assert recommended["steps"] == 240 and torch.equal(recommended["end"], second[1]["end"])
    assert len(recommended["validated"]) > 2
    (best,) = (tmp_path / "best").glob("*.ckpt")  # what was removed has taken its folder along
    assert [path.name for path in (tmp_path / "best").glob("*.co2")] == [f"{best.name}.co2"]


@on_ranks(2, through=ranks)
def test_sigterm_to_all_processes_of_a_node_stops_at_one_boundary(rank: int, tmp_path: Path) -> None:
    """The two loading processes get it, too, and training goes on from the checkpoint."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    def terminate(trainer: Any, strategy: Any) -> None:
        if trainer.global_step == 7:
            plain.terminate_node()

    files = ModelCheckpoint(str(tmp_path), "{step}", save_on_exception=True, every_n_train_steps=1000)
    quiet: dict[str, Any] = dict(limit_val_batches=0, devices=2, loading=2)
    told = run(str(tmp_path), after_batch=terminate, callbacks=[files], enable_checkpointing=True, **quiet)
    assert told["stopped"] and told["steps"] == 15, "asked for at 7, sent at 10, heard at 15"
    written = torch.load(f"{tmp_path}/step=15.ckpt", weights_only=True)["state_dict"]
    assert alike(told["end"], plain.everything_in(written)) and torch.equal(told["end"], plain.everything_in(written))
    again = run(f"{tmp_path}/again", net=Net(7 + rank), resume=f"{tmp_path}/step=15.ckpt", **quiet)
    assert again["steps"] == 36 and alike(again["end"])


@pytest.mark.slow
@on_ranks(2, through=ranks)
def test_validates_behind_an_epochs_last_batch(rank: int, tmp_path: Path) -> None:
    """Validation behind each epoch, which an epoch's end reads: every epoch then ends with finish()."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    folder, workers = str(tmp_path), 2
    best = ModelCheckpoint(f"{folder}/best", "{step}", monitor="val_loss", save_top_k=-1)
    callbacks = [EarlyStopping("val_loss", patience=9), best]
    own = run(folder, callbacks=callbacks, devices=workers, enable_checkpointing=True)
    plain.assert_equal(own["trace"], plain.train(plain.shuffled(rank, workers), meets=[12, 24, 36]))
    again = run(
        folder,
        net=Net(7 + rank),
        resume=f"{folder}/best/step=12.ckpt",
        callbacks=[EarlyStopping("val_loss")],
        devices=workers,
    )
    plain.assert_equal([*again["trace"], again["end"]], [*own["trace"][12:], own["end"]])
    assert {float(score) for score in best.best_k_models.values()} == {float(x) for x in own["losses"]}
    assert [seen[:2] for seen in own["validated"]] == [(12, True), (24, True), (36, True)]
    assert all(alike(seen[2]) for seen in own["validated"])
    files = {path.name for path in (tmp_path / "best").glob("*.ckpt")}
    assert files == {f"step={step}.ckpt" for step in (12, 24, 36)}


@pytest.mark.slow
@on_ranks(2, through=ranks)
def test_saves_at_one_boundary_before_a_requeue(rank: int, tmp_path: Path) -> None:
    """Slurm's signal to one worker: all save at the same boundary, as Lightning's own handler saves."""
    import lightning.pytorch.trainer.connectors.signal_connector as signals

    folder, workers, asked = str(tmp_path), 2, list[Any]()
    signals.call = lambda command, **_: asked.append(command) or 0

    def tell(trainer: Any, strategy: Any) -> None:
        if trainer.global_step == 7 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    job = {"JOB_ID": "7", "NTASKS": workers, "NTASKS_PER_NODE": workers, "PROCID": rank, "LOCALID": rank, "NODEID": 0}
    os.environ |= {f"SLURM_{name}": str(value) for name, value in job.items()}
    whole = run(folder, after_batch=tell, limit_val_batches=0, devices=workers)
    plain.assert_equal(whole["trace"], plain.train(plain.shuffled(rank, workers), meets=[15]))
    assert asked == ([["scontrol", "requeue", "7"]] if rank == 0 else [])
    for name in job:
        del os.environ[f"SLURM_{name}"]
    again = run(folder, net=Net(7 + rank), resume=f"{folder}/hpc_ckpt_1.ckpt", limit_val_batches=0, devices=workers)
    plain.assert_equal([*again["trace"], again["end"]], [*whole["trace"][15:], whole["end"]])
    assert alike(again["end"])


def objects(rank: int, workers: int, folder: str) -> list[str]:
    """A schedule of NumPy's scalars goes on, and one that holds an object whose class is safe."""
    quiet: dict[str, Any] = dict(limit_val_batches=0, devices=workers, max_epochs=2)

    def both(inner: Any) -> None:
        whole = run(folder, after_batch=saving(folder, 12), factor=Factor(inner), **quiet)
        again = run(folder, net=Net(7), factor=Factor(inner), resume=f"{folder}/mid.ckpt", **quiet)
        plain.assert_equal(again["trace"], whole["trace"][12:])

    both(None)
    with torch.serialization.safe_globals([Inner]):
        both(Inner())
    with pytest.raises(UserError) as refusal:
        run(folder, after_batch=saving(folder, 12), factor=Factor(Inner()), **quiet)
    return [str(refusal.value)]


def test_a_checkpoint_that_lightning_could_not_load_is_refused(tmp_path: Path) -> None:
    (said,) = ranks(objects, 1, str(tmp_path))
    plain.assert_lines(said, "CO2Strategy", f"schedule0.lr_lambdas.0.inner is a {plain.INNER}, which")
    assert f"add_safe_globals([{plain.INNER}])" in said[0]


class Dropping(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x))


@on_ranks(2, through=ranks)
def test_random_numbers_go_on_after_an_epoch_with_loading_processes(rank: int, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    asked: dict[str, Any] = dict(limit_val_batches=0, devices=2, loading=2, enable_checkpointing=True, max_epochs=2)
    files = ModelCheckpoint(str(tmp_path), "{step}", save_top_k=-1)
    whole = run(str(tmp_path), net=Dropping(), callbacks=[files], **asked)
    files = ModelCheckpoint(f"{tmp_path}/again", save_top_k=-1)
    again = run(str(tmp_path), net=Dropping(7), resume=f"{tmp_path}/step=12.ckpt", callbacks=[files], **asked)
    plain.assert_equal(again["trace"], whole["trace"][12:])


@on_ranks(1, through=ranks)
def test_mistakes_get_one_line(rank: int, tmp_path: Path) -> None:  # noqa: ARG001
    from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging

    from core.integrations.lightning import CO2Strategy

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.first = nn.DataParallel(nn.Linear(6, 3)), nn.Linear(1, 1)

    class Unfreezes(BackboneFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net.first)

    every = ({"sync_batchnorm": True}, {"net": Wrapped()}, {"callbacks": [StochasticWeightAveraging(0.1)]})
    every += ({"net": Net(), "callbacks": [Unfreezes()]},)
    assert CO2Strategy().co2 is None
    said = plain.said_of(every, lambda **changes: run(str(tmp_path), limit_val_batches=0, **changes))
    plain.assert_lines(said, "CO2Strategy", "is SyncBatchNorm", "in DataParallel", "use WeightAveraging", "Unfreezes")
