"""Elastic workers forked from a process that has imported what they need, for campaigns and tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from training.coordinator import Agent


class Forked:
    """A worker's process in the form of subprocess.Popen."""

    def __init__(self, process: Any):
        self.process = process
        process.start()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.process.pid, sig)


class Crew(Agent):
    """Workers that run target(*args) each, under a launcher in this process.

    context: of multiprocessing. late: seconds after which all are killed.
    """

    def __init__(
        self,
        context: Any,
        target: Callable[..., None],
        args: Sequence[Any],
        workers: int,
        restarts: int = 0,
        *,
        late: float = 120.0,
    ):
        def spawn(env: dict[str, str]) -> Forked:
            return Forked(context.Process(target=_worker, args=(env, target, args), daemon=True))

        super().__init__(spawn, workers, restarts)
        self.end, self.timed_out = time.monotonic() + late, False

    def look(self) -> None:
        """See Agent."""
        super().look()
        if time.monotonic() > self.end and self.processes:
            self.timed_out, self.restarts = True, 0
            for process in self.processes.values():
                process.kill()


def _worker(env: dict[str, str], target: Callable[..., None], args: Sequence[Any]) -> None:
    os.environ.update({"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"} | env)
    import torch

    torch.set_num_threads(1)
    target(*args)
