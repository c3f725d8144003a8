"""CO2Callback in the real Trainer, against the plain loop: bit for bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2Config, CollectiveError
from tests.integrations import plain
from tests.integrations.plain import BATCH, EPOCHS, PAPER, Net
from tests.integrations.ranks import ranks
from tests.on_ranks import on_ranks
from tests.problems import refusal

LIBRARY = ["transformers.trainer", "core.integrations.transformers", "tensorboard", "torch.utils.tensorboard"]


class ForTrainer(Net):
    """As Trainer calls it."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class PerToken(ForTrainer):
    """A language model's way: its loss is divided by the number of labels that Trainer counts."""

    accepts_loss_kwargs = True

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = Net.forward(self, x)
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch}


def watcher(trainer: Any, callback: Any, watch: Any) -> Any:
    """A callback that is added last: it sees what CO2Callback has left."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.trace: list[Tensor] = []
            self.evaluated: list[tuple[int, bool, Tensor]] = []
            self.saved: list[tuple[int, bool]] = []
            self.wrapped: list[str] = []
            self.config: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.trace.append(plain.everything(model))
            self.wrapped.append(type(trainer.model_wrapped).__name__)
            self.config = callback.co2.config
            if watch:
                watch(state, control, callback)

        def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.evaluated.append((state.global_step, callback.co2.at_boundary, plain.everything(model)))

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.saved.append((state.global_step, callback.co2.at_boundary))

    return Watch()


def arguments(folder: str, changes: dict[str, Any]) -> Any:
    from transformers import TrainingArguments

    settings = dict(output_dir=folder, per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, max_grad_norm=0.0)
    settings |= dict(train_sampling_strategy="sequential", lr_scheduler_type="constant", use_cpu=True)
    settings |= dict(report_to="none", save_strategy="no", logging_strategy="no", logging_steps=3, disable_tqdm=True)
    return TrainingArguments(**(settings | changes))


def run(
    folder: str,
    config: CO2Config | None = PAPER,
    *,
    resume: Any = None,
    watch: Any = None,
    trial: Any = None,
    **changes: Any,
) -> Any:
    """Trains; a dictionary of what is looked at."""
    from transformers import Trainer

    from core.integrations.transformers import CO2Callback

    x, y = plain.examples()
    data: Any = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    callbacks, model = changes.pop("callbacks", None), changes.pop("model", None) or ForTrainer()
    trainer = Trainer(
        model,
        arguments(folder, changes),
        train_dataset=data,
        eval_dataset=data[:12],
        optimizers=(plain.adam(model), None),
        callbacks=callbacks,
    )
    callback = CO2Callback(trainer, config)
    trainer.add_callback(callback)
    trainer.add_callback(seen := watcher(trainer, callback, watch))
    trainer.train(resume_from_checkpoint=resume, trial=trial)
    assert callback.co2 is None
    state = trainer.state
    looked_at = {"end": plain.everything(model), "log": state.log_history, "best": state.best_model_checkpoint}
    return vars(seen) | looked_at | {"steps": state.global_step}


@on_ranks(2, through=ranks)
def test_sigterm_to_all_processes_of_a_node_reaches_only_a_handler(rank: int, tmp_path: Path) -> None:
    def terminate(state: Any, *_: Any) -> None:
        if state.global_step == 7:
            plain.terminate_node()

    with plain.hears_sigterm() as heard:
        own: Any = run(str(tmp_path), watch=terminate, dataloader_num_workers=2)
    assert len(heard) == 1
    plain.assert_equal(own["trace"], plain.train(plain.in_turn(rank, 2)))


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks(through=ranks)
def test_trains_as_the_plain_loop(rank: int, workers: int, tmp_path: Path) -> None:
    """Our reading of the paper's rule; accumulation with a remainder and a clipped norm."""
    batches, folder = plain.in_turn(rank, workers), str(tmp_path)
    own: Any = run(
        f"{folder}/a",
        watch=lambda state, *_: plain.go_apart(folder, rank, state.global_step),
        logging_strategy="steps",
        logging_steps=1,
    )
    plain.assert_equal(own["trace"], plain.train(batches))
    assert {*own["wrapped"]} == {"ForTrainer"}
    if workers == 2:
        own = run(f"{folder}/b", gradient_accumulation_steps=5, max_grad_norm=0.5)
        plain.assert_equal(own["trace"], plain.train(batches, micro=5, clip=0.5))
        own = run(f"{folder}/c", plain.FRAGMENTS, bf16=True, max_steps=9)
        plain.assert_equal(own["trace"], plain.train(batches, plain.FRAGMENTS, updates=9, dtype=torch.bfloat16))
        Path(folder, f"passed{plain.TAU - 1}").unlink(missing_ok=True)
        torch.distributed.barrier()
        own = run(
            f"{folder}/d",
            model=PerToken(),
            max_steps=7,
            watch=lambda state, *_: plain.go_apart(folder, rank, state.global_step),
        )
        plain.assert_equal(own["trace"], plain.train(batches, updates=7))


EVALUATED, SAVED = range(6, 37, 6), range(9, 37, 9)


def held_run(rank: int, workers: int, folder: str) -> Any:
    """Logs, evaluations and checkpoints within rounds; then checkpoints are gone on from."""
    asked = dict(eval_strategy="steps", eval_steps=6, save_strategy="steps", save_steps=9, logging_strategy="steps")
    asked |= dict(report_to="tensorboard")
    os.environ["TENSORBOARD_LOGGING_DIR"] = f"{folder}/tb"
    whole: Any = run(f"{folder}/held", **asked)
    meets = {*EVALUATED, *SAVED}
    plain.assert_equal(whole["trace"], plain.train(plain.in_turn(rank, workers), meets=meets, told=True))
    for step in (9, 27):
        # another start: all must come from the checkpoint
        model = ForTrainer(seed=7 + rank)
        again: Any = run(f"{folder}/again", model=model, resume=f"{folder}/held/checkpoint-{step}", **asked)
        plain.assert_equal([*again["trace"], again["end"]], [*whole["trace"][step:], whole["end"]])
    return {name: whole[name] for name in ("evaluated", "saved", "log")}


def test_evaluations_and_checkpoints_are_of_one_model_and_logs_wait_for_a_boundary(tmp_path: Path) -> None:
    first, second = ranks(held_run, 2, str(tmp_path))
    for result in (first, second):
        assert [(step, True) for step in SAVED] == result["saved"]
        assert [(step, True) for step in EVALUATED] == [seen[:2] for seen in result["evaluated"]]
    for (_, _, a), (_, _, b) in zip(first["evaluated"], second["evaluated"], strict=True):
        assert torch.equal(a, b), "workers evaluated unlike models"
    logs = [entry for entry in first["log"] if "loss" in entry]
    # asked for at 3, 6, ... 36; rounds of 5 begin anew behind each evaluation and checkpoint
    assert [entry["step"] for entry in logs] == [5, 6, 9, 12, 17, 18, 23, 24, 27, 30, 35, 36]
    landed = [entry["co2/round"] for entry in logs if entry["co2/allreduce_seconds"]]  # nothing has in a first round
    assert landed == sorted(set(landed)) and len(landed) == 8
    assert all(f"co2/{name}" in logs[0] for name in ("tau", "exposed_seconds", "momentum_norm"))
    assert plain.tags(tmp_path / "tb") >= {"train/co2/round", "train/loss", "train/co2/exposed_seconds"}


def mid_round(rank: int, workers: int, folder: str) -> None:
    """A checkpoint that a callback behind ours asks for in mid-round is of one model, and gone on from bit for bit."""

    def ask(state: Any, control: Any, callback: Any) -> None:
        control.should_save = state.global_step == 13

    config = plain.FRAGMENTS  # one is in flight there
    whole: Any = run(f"{folder}/mid", config, watch=ask)
    assert whole["saved"] == [(13, True)]
    again: Any = run(f"{folder}/again", config, model=ForTrainer(9), resume=f"{folder}/mid/checkpoint-13")
    plain.assert_equal([*again["trace"], again["end"]], [*whole["trace"][13:], whole["end"]])


def best_and_early(rank: int, workers: int, folder: str) -> Any:
    """Training stops early, and the best model is loaded behind finish(); the recommended settings, to the end."""
    from transformers import EarlyStoppingCallback

    asked: Any = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    asked |= dict(load_best_model_at_end=True, metric_for_best_model="loss", learning_rate=1.0)
    asked |= dict(callbacks=[EarlyStoppingCallback(early_stopping_patience=2)], num_train_epochs=20)
    stopped: Any = run(f"{folder}/best", **asked)
    best = next(model for step, _, model in stopped["evaluated"] if stopped["best"].endswith(f"-{step}"))
    assert torch.equal(best, stopped["end"]), "the best model is not what is left"
    recommended: Any = run(
        f"{folder}/recommended",
        None,
        num_train_epochs=20,
        **{name: asked[name] for name in ("eval_strategy", "eval_steps", "save_strategy", "save_steps")},
    )
    assert recommended["config"] == CO2Config.recommended(steps=240)
    keys = ("evaluated", "end", "steps", "saved")
    return {"stopped": {k: stopped[k] for k in keys}, "recommended": {k: recommended[k] for k in keys}}


@pytest.mark.slow
def test_saves_in_mid_round_stops_early_and_loads_the_best(tmp_path: Path) -> None:
    ranks(mid_round, 2, str(tmp_path))
    a, b = ranks(best_and_early, 2, str(tmp_path))
    assert a["stopped"]["steps"] < 240 and a["stopped"]["steps"] == b["stopped"]["steps"]
    for kind in ("stopped", "recommended"):
        assert torch.equal(a[kind]["end"], b[kind]["end"])
        assert len(a[kind]["evaluated"]) > 2 and all(at_boundary for _, at_boundary, _ in a[kind]["evaluated"])
        for (step, _, x), (other, _, y) in zip(a[kind]["evaluated"], b[kind]["evaluated"], strict=True):
            assert step == other and torch.equal(x, y), f"{kind}: unlike models evaluated at {step}"
    assert a["recommended"]["steps"] == 240


@on_ranks(2, through=ranks)
def test_an_exception_in_training_leaves_the_others(rank: int, tmp_path: Path) -> None:
    """A worker's training raises, and its process stays, as in a notebook."""
    from transformers import TrainerCallback

    class Fails(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if rank == 1 and state.global_step == 7:
                raise KeyError("deliberate")

    with pytest.raises(KeyError if rank else CollectiveError):
        run(str(tmp_path), callbacks=[Fails()])


def alone(rank: int, workers: int, folder: str) -> None:
    """One process, without a process group."""
    torch.distributed.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    again: Any = run(folder, resume=f"{folder}/two/checkpoint-2")  # of two workers
    assert again["steps"] == EPOCHS * plain.EXAMPLES // BATCH
    own: Any = run(folder)
    plain.assert_equal(own["trace"], plain.train(plain.in_turn(0, 1)))
    assert torch.equal(own["trace"][-1], own["end"])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def mistakes(rank: int, workers: int, folder: str) -> list[str]:
    from transformers import Trainer

    from core.integrations.transformers import CO2Callback

    few = [{"x": torch.zeros(6), "labels": 0}] * 4
    trainer = Trainer(ForTrainer(), arguments(folder, {}), train_dataset=few)
    callback = CO2Callback(trainer, PAPER)
    assert "add it with trainer.add_callback()" in refusal(trainer.train)
    trainer.add_callback(callback)
    trainer.train()
    run(f"{folder}/plain", max_steps=2, save_strategy="steps")
    if rank == 0:
        shutil.copytree(f"{folder}/plain", f"{folder}/two")
        shutil.rmtree(f"{folder}/plain/checkpoint-2/co2")
    torch.distributed.barrier()
    data = nn.DataParallel(nn.Linear(6, 3))
    every = (
        {"include_num_input_tokens_seen": "all"},
        {"auto_find_batch_size": True},
        {"enable_jit_checkpoint": True},
        {"optim": "schedule_free_adamw"},
        {"trial": {"learning_rate": 0.1}},
        {"model": nn.Sequential(ForTrainer(), data)},
        {"model": nn.Sequential(ForTrainer(), nn.SyncBatchNorm(3))},
        {"resume": f"{folder}/plain/checkpoint-2"},
    )
    return plain.said_of(every, lambda **changes: run(folder, **changes))


def test_alone_and_mistakes_get_one_line(tmp_path: Path) -> None:
    said, others = ranks(mistakes, 2, str(tmp_path))
    assert said == others
    told = ("include_num_input_tokens_seen='all' makes all workers wait", "auto_find_batch_size=True lets")
    told += ("enable_jit_checkpoint=True saves", "optim='schedule_free_adamw' keeps", "hyperparameter_search with 2")
    told += ("the model is in DataParallel", "SyncBatchNorm", "load only the weights")
    plain.assert_lines(said, "CO2Callback", *told)
    ranks(alone, 1, str(tmp_path))
