"""Logs of `--tracker` in W&B and MLflow: the real packages offline where they are installed, and a stand-in."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from core import UserError
from tests.runs import rows, summary
from tests.training.test_run import train

Scalars = dict[tuple[int, str], float]


def expected(folder: Path) -> Scalars:
    """The numbers in metrics.jsonl and summary.json, by step and name."""
    others = ("step", "seconds", "of_model")
    lines = {(row["step"], k): v for row in rows(folder) for k, v in row.items() if k not in others and v is not None}
    end = summary(folder)
    return {k: v for k, v in lines.items() if v is not None} | {
        (end["steps"], f"summary/{k}"): v for k, v in end.items()
    }


class StandIn(types.ModuleType):
    """Records the calls of wandb and mlflow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str):
        super().__init__(name)
        self.calls: list[tuple[str, tuple, dict[str, Any]]] = []
        self.id, self.info = "a1", types.SimpleNamespace(run_id="a1")
        monkeypatch.setitem(sys.modules, name, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **given: Any) -> "StandIn":
            self.calls.append((name, args, given))
            return self

        return call

    def of(self, name: str) -> list[Any]:
        return [(args, given) for called, args, given in self.calls if called == name]


def test_wandb_gets_config_and_scalars_and_a_resumed_run_continues_its_run(tmp_path: Path, monkeypatch):
    tool = StandIn(monkeypatch, "wandb")
    plain = train(tmp_path / "plain", 6)
    train(tmp_path / "run", 6, crash_at=3, tracker="wandb")
    ((_, first),), logged = tool.of("init"), [args[0] for args, _ in tool.of("log")]
    assert first["name"] == "run" and first["dir"] == tmp_path / "run" and first["id"] is None
    assert first["config"]["recipe"]["co2"]["tau"] == 3 and first["config"]["world_size"] == 1
    assert [line["step"] for line in logged if "train_loss" in line] == [1, 2, 3]
    assert tool.of("define_metric") == [(("*",), {"step_metric": "step"})]
    assert tool.of("finish") == [((), {"exit_code": 1})]
    tool.calls.clear()
    resumed = train(tmp_path / "run", 6, resume=True, tracker="wandb")
    ((_, again),) = tool.of("init")
    assert (again["id"], again["resume"]) == ("a1", "allow") and tool.of("finish") == [((), {"exit_code": 0})]
    logged += [args[0] for args, _ in tool.of("log")]
    sent = {(line["step"], name): value for line in logged for name, value in line.items() if name != "step"}
    assert {k: sent[k] for k in expected(tmp_path / "run")} == expected(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(plain, resumed, strict=True))


def test_mlflow_gets_parameters_once_and_metrics(tmp_path: Path, monkeypatch):
    tool = StandIn(monkeypatch, "mlflow")
    train(tmp_path, 6, crash_at=3, tracker="mlflow")
    train(tmp_path, 6, resume=True, tracker="mlflow")
    (((parameters,), _),) = tool.of("log_params")
    assert parameters["recipe.co2.tau"] == 3 and parameters["world_size"] == 1
    assert [given["run_id"] for _, given in tool.of("start_run")] == [None, "a1"]
    assert [args for args, _ in tool.of("end_run")] == [("FAILED",), ("FINISHED",)]
    sent = {(given["step"], name): v for args, given in tool.of("log_metrics") for name, v in args[0].items()}
    assert expected(tmp_path) == {k: sent[k] for k in expected(tmp_path)}


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch):
    with pytest.raises(UserError, match="^tracker=comet: give wandb or mlflow$"):
        train(tmp_path, 1, tracker="comet")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="^tracker=wandb: no package wandb: pip install it, or leave it out$"):
        train(tmp_path / "absent", 1, tracker="wandb")

    def start_run(**_: Any) -> None:
        raise RuntimeError("no server\nanswers")

    StandIn(monkeypatch, "mlflow").start_run = start_run
    with pytest.raises(
        UserError, match=r"^tracker=mlflow: it cannot start \(RuntimeError: no server\): set the tool's"
    ):
        train(tmp_path / "failed", 1, tracker="mlflow")
