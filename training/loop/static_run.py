"""A run with a fixed set of workers: process group, nodes, checkpoints. See training/elastic.py for elastic runs."""

import contextlib
import functools
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm

from core.baselines.table import Method, make_method, spec_of
from core.checkpoint import runs as checkpoint
from core.checkpoint import stored
from core.checkpoint.runs import random_state, set_random_state
from core.errors import UserError
from core.local_update import LocalUpdateMethod
from training.data.samples import mix
from training.folder.rounds import RoundLog
from training.folder.run_folder import RunFolder
from training.folder.settings import settings
from training.loop.progress import Actions, Progress, TrainState
from training.start.workers import join, largest_of_workers, make_mesh

T = TypeVar("T")
NEEDS = {"node": int, "rng": dict, "means": dict, "totals": dict}  # what _resume reads, see load_newest


class StaticRun:
    """One worker's part in a run with a fixed set of workers. For `mesh` see Run."""

    _trained: TrainState

    def __init__(self, run: Progress, folder: RunFolder, rounds: RoundLog):
        self.run, self.folder, self.rounds = run, folder, rounds
        self.mesh: DeviceMesh | None = None
        self._saver: checkpoint.Saver | None = None
        self._made_group = False
        self._total_before: int | None = None  # of the checkpoint that the run resumes
        self._hand_over: Callable[[], None] = lambda: None  # completes a checkpoint with the method's part

    def meet(self) -> None:
        """Joins the other workers, opens the run folder, and groups the workers of a node."""
        run, r = self.run, self.run.recipe
        self._made_group = join(run.device, r.timeout, settings(r))
        self.folder.open(r, run.world_size, run.device)
        if spec_of(r.method).kind != "optimizer":  # zeroth order has no gradients to synchronize
            self.mesh = make_mesh(run.device, r.per_node, r.zero, r.timeout)
        place = run.rank, run.world_size
        first = run.rank % self._per_node if r.light_checkpoints else None
        self._saver = checkpoint.Saver(self.folder.checkpoints, *place, self.folder.attempt, r.timeout, light=first)

    def leave(self, failed: bool) -> None:
        """Waits for the checkpoint that is being written, unless the run failed, and leaves the other workers."""
        if self._saver is not None and not failed:
            self._hand_over()  # if the loop ended without stop() or end()
            self._saver.close()
        elif self._saver is not None:
            self._saver.abandon()
        if self._made_group and not failed:
            dist.destroy_process_group()

    def shard(self, model: nn.Module, compute: torch.dtype) -> nn.Module:
        """Returns the model on the device, sharded with ZeRO-2 and 3. `compute` is the dtype of gathered parameters."""
        r = self.run.recipe
        model, everywhere = model.to(self.run.device), r.method == "ddp"
        return _zero().shard_model(model, self.mesh, r.zero, everywhere=everywhere, compute=compute)

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns the optimizer, with its state sharded with ZeRO-1."""
        return _zero().shard_optimizer(optimizer, self.mesh, self.run.recipe.zero)

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the model's parameters gathered, for evaluations."""
        return _zero().gathered(self._trained.model, self.run.recipe.zero)

    def make_method(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Method]:
        """Returns the wrapped model and the method, see core.baselines.table.make_method."""
        r = self.run.recipe
        return make_method(
            r.method,
            model,
            co2=r.co2,
            lr=lambda: optimizer.param_groups[0]["lr"],
            mesh=self.mesh,
            shard=r.shard,
            offload=r.offload,
            timeout=r.timeout,
            link=self.run.link,
            hooks=[self.run.requests, self.run.snapshots],
            **r.own_settings,
        )

    def begin(self, trained: TrainState, samples: int, epoch: int) -> float:  # noqa: ARG002
        """Resumes if the recipe says so. Returns the seconds of training that led to the state."""
        self._trained, self._hand_over = trained, trained.hand_over
        seconds = self._resume() if self.run.recipe.resume else 0.0
        self.folder.begin(self.run.step, self.run.total, self._total_before)
        return seconds

    def batches(self, make: Callable[[Any, int, int, int, int], Iterator[T]], start: int, total: int) -> Iterator[T]:
        """Yields the batches of steps `start` to `total`."""
        return make(self.run.recipe, self.run.rank, self.run.world_size, start, total)

    def come_together(self, due: Actions) -> Actions:
        """Returns the same `due` on all workers.

        In a node a worker only receives requests from workers with the same place in other nodes.
        """
        run, method = self.run, self._trained.method
        if isinstance(method, LocalUpdateMethod) and method.total_world_size < run.world_size and method.at_boundary:
            assert self.mesh is not None
            return Actions(*map(bool, largest_of_workers([*vars(due).values()], self.mesh.get_group(1))))
        return due

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over all workers, in the host's memory."""
        return Progress.sum_tensor(self.run, values)

    def stopped_by(self, number: int) -> int:
        """Returns the signal that stops the run, on all workers. It may have reached one worker only."""
        return largest_of_workers([number])[0]

    def conclude(self, act: Callable[[], None]) -> None:
        """Runs `act` on every worker, and closes the method."""
        act()
        self._trained.method.close()

    # -- checkpoints ----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Starts a checkpoint: copies the state, except an all-reduce in flight."""
        assert self._saver is not None
        run, trained = self.run, self._trained
        with run.clock.paused():
            self._saver.wait()
            self.rounds.read()
            if not isinstance(trained.method, LocalUpdateMethod):
                trained.method.sync_for_eval()
            live = trained.state_dict() | self._counted() | {"node": self._per_node, "rng": random_state(run.device)}
            trained.snapshot(functools.partial(self._write, time.monotonic(), stored.on_host(live)))

    def _counted(self) -> dict[str, Any]:
        """Returns a checkpoint's counters of the loop and the log."""
        run, totals = self.run, vars(self.rounds.overlap) | {"seconds": self.run.clock.seconds}
        return {"step": run.step, "total": run.total, "means": run.means.state_dict(), "totals": totals}

    def _count_on(self, state: dict[str, Any]) -> float:
        """Continues from those counters. Returns the seconds of training that led to them."""
        vars(overlap := self.rounds.overlap).update({name: state["totals"][name] for name in vars(overlap)})
        self.run.means.load_state_dict(state["means"])
        self.run.step = int(state["step"])
        self._total_before = state.get("total")
        return state["totals"]["seconds"]

    def saved(self) -> bool:
        """Waits until the last checkpoint is written. Returns False if it was not, because the model is not finite."""
        assert self._saver is not None
        return self._saver.wait()

    def _write(self, begun: float, state: dict[str, Any], method: dict[str, Any]) -> None:
        """Writes a checkpoint once the method's part is complete. An all-reduce in flight delays it to a boundary."""
        assert self._saver is not None
        self._saver.start(state["step"], state | self._trained.state_of_method(method), begun)

    def _resume(self) -> float:
        """Restores the newest checkpoint, if there is one. Returns the seconds of training that led to it."""
        run, folder = self.run, self.folder
        found = checkpoint.load_newest(folder.checkpoints, rank=run.rank, needs=self._trained.needs | NEEDS)
        if found is None:
            return 0.0
        state, workers = found
        if (was := state["method"]["name"]) != run.recipe.method:
            raise UserError(f"{folder.path} was trained with {was}, not {run.recipe.method}")
        if state["node"] != self._per_node:
            raise UserError(
                f"{folder.path} was trained with {state['node']} workers per node, this run has {self._per_node}: "
                f"resume with --per_node {state['node']}"
            )
        try:
            self._trained.load_state_dict(state)
        except RuntimeError as error:  # the data sets a classifier's width
            if not (sizes := re.search("size mismatch.*", str(error))):
                raise
            remedy = "restore the data that it began with, or choose another --out"
            raise UserError(f"{folder.path} is a run of another model ({sizes[0]}): {remedy}") from None
        seconds = self._count_on(state)
        if workers == run.world_size:
            set_random_state(state["rng"], run.device)
        else:
            self._change_workers(workers)
        return seconds

    def _change_workers(self, before: int) -> None:
        """Gives all workers new random states, and warns which parts of the checkpoint are kept."""
        run, r = self.run, self.run.recipe
        torch.manual_seed(mix(r.seed, run.rank, run.step))
        if run.rank > 0:
            return
        now, its = run.world_size, "the optimizer's states"
        rest = f"{its} of rank {now} and above are dropped" if now < before else f"rank {before} and above copy {its}"
        tqdm.write(
            f"warning: {before} workers wrote the checkpoint, {now} go on: the parameters, {r.method}'s "
            f"state and what was in flight carry over; {rest}; random states begin anew",
            file=sys.stderr,
        )

    @property
    def _per_node(self) -> int:
        """Number of workers that synchronize every step."""
        return self.mesh.size(1) if self.mesh is not None else 1


def _zero() -> Any:
    """Returns layouts/zero.py. It is imported on first use, because FSDP takes half a second to import."""
    from training.layouts import zero

    return zero
