"""What every train script shares: ranks, the run folder, metrics, progress, stopping and resuming."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from core.baselines import Method, make_method
from core.errors import UserError
from core.groups import local_world_size, node_mesh
from core.overlap import Overlap, RoundStats
from core.rounds import Rounds
from training import checkpoint
from training.provenance import describe
from training.recipe import Recipe, rank, world_size
from training.sampling import per_worker
from training.throttle import ThrottledLink
from training.trace import Trace


class Run:
    """One training run of this worker: use it as a context manager around the loop.

    Attributes: rank, world_size, device, folder, link (an emulated slow link, or None).
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.rank, self.world_size = rank(), world_size()
        per_worker(recipe.batch_size, self.world_size)
        self.device = _device(recipe.device)
        self.folder = recipe.folder
        self.link = ThrottledLink(recipe.link_mbit) if recipe.link_mbit else None
        if self.link and self.device.type == "cuda":
            raise UserError(f"link_mbit={recipe.link_mbit}: the emulated link works on CPUs only; leave it out")
        self.overlap = Overlap()
        self._unread: list[tuple[int, RoundStats]] = []  # rounds whose times a GPU may still be taking
        self._trace: Trace | None = None
        self._model: nn.Module | None = None
        self.mesh: DeviceMesh | None = None  # [nodes, workers of a node], where those synchronise every step
        self._stop_signal = 0
        self._stop_asked_at = 0.0
        self._seconds = 0.0  # of training, evaluation and checkpoints left out
        self._since: float | None = None
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Run:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._made_group = "RANK" in os.environ and not dist.is_initialized()
        if self._made_group:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=self.recipe.timeout))
        torch.manual_seed(self.recipe.seed * 1_000_003 + self.rank)  # rank 0's initial parameters are broadcast
        self.mesh = self._make_mesh()
        self._open_folder()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        if self.rank == 0:
            self.writer.close()
            self._metrics.close()
        if self._made_group and kind is None:
            dist.destroy_process_group()

    def _open_folder(self) -> None:
        """Rank 0 makes the folder; refuses one that holds another run's metrics."""
        refusal = ""
        if self.rank == 0:
            if (self.folder / "metrics.jsonl").exists() and not self.recipe.resume:
                refusal = f"{self.folder} holds a run: add --resume to continue it, or choose another --out"
            else:
                self.folder.mkdir(parents=True, exist_ok=True)
                made = describe(self.recipe, self.world_size, self.device)
                (self.folder / "config.json").write_text(json.dumps(made, indent=2, default=str))
                self._metrics = open(self.folder / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115
                self.writer = SummaryWriter(str(self.folder))
                if self.recipe.trace:
                    first = 8 if self.recipe.co2.tau == "auto" else 2  # tau has settled by then
                    self._trace = Trace(self.folder / "trace.json", cuda=self.device.type == "cuda", first=first)
        if dist.is_initialized():
            box = [refusal]
            dist.broadcast_object_list(box, src=0)
            refusal = box[0]
        if refusal:
            raise UserError(refusal)

    # -- training -------------------------------------------------------------------------------------------

    def _make_mesh(self) -> DeviceMesh | None:
        """[nodes, workers of a node] where the recipe has workers synchronise every step."""
        n = self.recipe.per_node or local_world_size()
        _zero().check(self.recipe.zero, n) if self.recipe.zero else None
        if n > 1 and not dist.is_initialized():
            raise UserError(f"per_node={n} needs {n} workers or a multiple: start them with torchrun")
        return node_mesh(self.device.type, n) if n > 1 else None

    def shard(self, model: nn.Module) -> nn.Module:
        """The model on this worker's device, its parameters sharded inside the node with ZeRO-2 and 3."""
        self._model = model.to(self.device)
        if self.mesh is None:
            return self._model
        return _zero().shard_model(self._model, self.mesh, self.recipe.zero, everywhere=self.recipe.method == "ddp")

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimiser, its state shared out inside the node with ZeRO-1."""
        return _zero().shard_optimizer(optimizer, self.mesh, self.recipe.zero) if self.mesh else optimizer

    def make_method(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Method]:
        """The recipe's method around `model`: see core.baselines.make_method."""
        r = self.recipe
        return make_method(
            r.method,
            model,
            co2=r.co2,
            slowmo=r.slowmo,
            overlap_local=r.overlap_local,
            lr=lambda: optimizer.param_groups[0]["lr"],
            average_buffers=r.average_buffers,
            mesh=self.mesh,
            timeout=r.timeout,
            link=self.link,
        )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast to the recipe's precision where the device has it."""
        kind = self.device.type
        usable = kind == "cpu" or torch.cuda.is_bf16_supported()
        on = self.recipe.precision == "bfloat16" and usable
        return torch.autocast(kind, torch.bfloat16) if on else contextlib.nullcontext()

    def progress(self, total: int, initial: int = 0) -> tqdm[Any]:
        """A progress bar over optimiser steps on rank 0, and the start of the run's clock."""
        interval = 0.5 if sys.stderr.isatty() else 20.0
        label = f"{self.recipe.name} {self.recipe.method}"
        self._bar = tqdm(total=total, initial=initial, desc=label, disable=self.rank != 0, mininterval=interval)
        self._since = time.perf_counter()
        return self._bar

    @property
    def seconds(self) -> float:
        """Seconds of training so far, without evaluations and checkpoints."""
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    @contextlib.contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        self._seconds, self._since = self.seconds, None
        yield
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock, and gathers a sharded model's parameters: for evaluations."""
        gathering = contextlib.nullcontext()
        if self.mesh is not None and self._model is not None:
            gathering = _zero().gathered(self._model, self.recipe.zero)
        with self._clock_stopped(), gathering:
            yield

    def count(self, method: Method, step: int) -> None:
        """Call it when a round has closed: adds it to the run's communication and logs its statistics.

        On a GPU they are read when the next round closes, so that the host does not wait for them.
        """
        self._unread.append((step, method.stats))
        while len(self._unread) > (self.device.type == "cuda"):
            self._read(synchronous=method.tau == 1)
        if isinstance(method, Rounds) and (decision := method.tau_decision):
            self.note(step, "tau", f"tau {decision.old} -> {decision.new}: {decision.reason}")
        if self._trace and self._trace.close_round():
            self.note(step, "trace", f"trace in {self._trace.path}")

    def _read(self, *, synchronous: bool) -> None:
        step, stats = self._unread.pop(0)
        values = stats.as_dict()
        self.overlap.add(values)
        if not synchronous or self.overlap.rounds % self.recipe.log_every == 0:  # there a round is a step
            self.log(step, **{f"round/{k}": v for k, v in values.items()})

    def note(self, step: int, name: str, text: str) -> None:
        """A line of text on the screen, in metrics.jsonl and in TensorBoard, by rank 0."""
        if self.rank:
            return
        tqdm.write(f"step {step}: {text}", file=sys.stderr)
        self._metrics.write(json.dumps({"step": step, "seconds": round(self.seconds, 3), name: text}) + "\n")
        self.writer.add_text(name, text, step)

    def log(self, step: int, **scalars: float | Tensor) -> None:
        """One line of metrics.jsonl and TensorBoard scalars, by rank 0."""
        if self.rank:
            return
        values = {k: float(v) for k, v in scalars.items()}
        self._metrics.write(json.dumps({"step": step, "seconds": round(self.seconds, 3), **values}) + "\n")
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def log_train(self, step: int, **scalars: float | Tensor) -> None:
        """`log` with the share of communication hidden so far, and the progress bar's figures."""
        self.log(step, **scalars, hidden_share=self.overlap.hidden_share)
        if self._bar is not None and not self._bar.disable:
            shown = {k.rsplit("/")[-1]: f"{float(v):.4g}" for k, v in scalars.items()}
            link = {"hidden": f"{self.overlap.hidden_share:.0%}", "link": f"{self.overlap.link_mbit:.4g}Mbit/s"}
            self._bar.set_postfix(shown | link, refresh=False)

    def sum(self, *values: float | Tensor) -> list[float]:
        """Sums over all workers, in float64; every worker must call it."""
        total = torch.tensor([float(v) for v in values], dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.tolist()

    def _largest(self, number: int) -> int:
        """The largest of all workers' numbers."""
        largest = torch.tensor(number, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    # -- stopping and resuming ------------------------------------------------------------------------------

    def _on_signal(self, number: int, _: Any) -> None:
        """The first signal ends the run after the current steps; another, over 2 s later, at once."""
        now = time.monotonic()
        if self._stop_signal and now - self._stop_asked_at > 2:  # torchrun and the terminal both send one
            raise KeyboardInterrupt
        if not self._stop_signal:
            self._stop_signal, self._stop_asked_at = number, now

    def should_stop(self, step: int) -> bool:
        """Whether a signal reached any worker; call it before every step, with the number of steps taken.

        All stop two steps on from the first to know, which ddp's workers do together; those of a local method may be
        past it already.
        """
        if not dist.is_initialized():
            return bool(self._stop_signal)
        store = dist.distributed_c10d._get_default_store()
        if self._stop_signal and not store.check(["co2/stop"]):
            store.set("co2/stop", str(step + 2))
        return store.check(["co2/stop"]) and step >= int(store.get("co2/stop"))

    def save(self, step: int, method: Method, **parts: Any) -> int:
        """Writes a checkpoint of everything with a state_dict in `parts`, at a round boundary or after finish().

        A signal may have stopped the workers at different steps: the checkpoint is of the largest, and is returned.
        """
        with self._clock_stopped():
            step = self._largest(step)
            for part in parts.values():
                while isinstance(part, LRScheduler) and part.last_epoch < step:
                    part.step()
            state = {name: part.state_dict() for name, part in parts.items()}
            totals = self.overlap.state_dict() | {"seconds": self._seconds}
            state |= {
                "step": step,
                "method": {"name": self.recipe.method, "state": method.state_dict()},
                "totals": totals,
            }
            state["rng"] = torch.get_rng_state()
            checkpoint.save(self.folder / "checkpoints", step, state, rank=self.rank, world_size=self.world_size)
        return step

    def load(self, method: Method, **parts: Any) -> int:
        """Restores the newest checkpoint when the recipe says resume; returns the step to go on from, 0 for none."""
        state = None
        if self.recipe.resume:
            folder = self.folder / "checkpoints"
            state = checkpoint.load(folder, rank=self.rank, world_size=self.world_size, device=self.device)
        if state is None:
            if self.rank == 0 and self.recipe.resume and self.folder.joinpath("checkpoints").exists():
                print(f"warning: no complete checkpoint in {self.folder}: starting from step 0", file=sys.stderr)
            return 0
        if state["method"]["name"] != self.recipe.method:
            raise UserError(f"{self.folder} was trained with {state['method']['name']}, not {self.recipe.method}")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        method.load_state_dict(state["method"]["state"])
        totals = state["totals"]
        self.overlap.load_state_dict(totals)
        self._seconds = totals["seconds"]
        torch.set_rng_state(state["rng"].cpu())
        return int(state["step"])

    def summarise(self, step: int, **results: float) -> None:
        """Writes summary.json: the results with what communication cost; prints it on rank 0."""
        while self._unread:
            self._read(synchronous=False)
        if self._trace and self._trace.finish():
            self.note(step, "trace", f"trace in {self._trace.path}")
        stopped = {"stopped_by_signal": self._stop_signal} if self._stop_signal else {}
        summary = {
            **results,
            "steps": step,
            "seconds": self.seconds,
            "steps_per_second": step / self.seconds if self.seconds else 0.0,
            **self.overlap.summary(),
            **stopped,
        }
        if self.rank == 0:
            (self.folder / "summary.json").write_text(json.dumps(summary, indent=2))
            text = ", ".join(f"{k} {v:.4g}" for k, v in summary.items())
            print(f"{self.recipe.name} {self.recipe.method}: {text}\n{self.folder}", flush=True)


def _zero() -> Any:
    """training.zero, imported where it is used: FSDP and torch.distributed.optim take a second to import."""
    from training import zero

    return zero


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch sees no CUDA device here; use --device cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
