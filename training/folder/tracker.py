"""Weights & Biases or MLflow, in addition to TensorBoard. The tools' own environment variables configure them."""

import importlib
import json
from pathlib import Path
from typing import Any

from core.errors import UserError
from training.recipe import flat
from training.start.errors import explained


class Tracker:
    """A run of wandb or mlflow, with the run folder's name and config.json. tracker.json in the folder holds its id.

    With `resume`, it continues the run that the folder names, if it is the same tool's.

    Raises:
        UserError: If the package is missing, or cannot start a run.
    """

    def __init__(self, kind: str, folder: Path, config: dict[str, Any], *, resume: bool):
        self.kind, file = kind, folder / "tracker.json"
        try:
            self._tool: Any = importlib.import_module(kind)
        except ModuleNotFoundError as error:
            raise UserError(f"tracker={kind}: no package {error.name}: pip install it, or leave it out") from None
        remedy = "set the tool's environment variables, or leave the option out"
        with explained(f"tracker={kind}: it cannot start", remedy):
            known = json.loads(file.read_text()).get(kind) if resume and file.exists() else None
            plain = json.loads(json.dumps(config, default=str))
            if kind == "wandb":
                self._run = self._tool.init(dir=folder, name=folder.name, config=plain, id=known, resume="allow")
                self._run.define_metric("*", step_metric="step")  # wandb's own step refuses lines that come late
                known = self._run.id
            else:
                run = self._tool.start_run(run_id=known, run_name=folder.name)
                if not known:  # MLflow refuses to change parameters
                    self._tool.log_params(flat(plain))
                known = run.info.run_id
            file.write_text(json.dumps({kind: known}))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Logs scalars. Both tools send them in the background."""
        if self.kind == "wandb":
            self._run.log({"step": step, **values})
        else:
            self._tool.log_metrics(values, step=step, synchronous=False)

    def close(self, *, complete: bool) -> None:
        """Sends what remains, and ends the tool's run, as failed unless it is complete."""
        if self.kind == "wandb":
            return self._run.finish(exit_code=0 if complete else 1)
        self._tool.flush_async_logging()
        self._tool.end_run("FINISHED" if complete else "FAILED")
