"""Recipes: what a run is made of, read from the command line, and how a user's mistake is reported."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
import tyro
from torch import nn

from core import CO2Config, UserError
from core.methods import DelayedConfig, MethodName, OverlapLocalConfig, SlowMoConfig, check_settings
from training.optim import OptimConfig
from training.sampling import per_worker
from training.workers import rank, world_size

if TYPE_CHECKING:
    from training.memory import Backward


@dataclass(frozen=True)
class Recipe:
    """The settings that every recipe has; a task's own recipe adds its model and data.

    The command line shows each field's docstring as its help text.
    """

    name: tyro.conf.Suppress[str] = ""
    method: MethodName = "co2"
    """How the workers are kept together. The period of every local method is co2.tau."""
    co2: CO2Config = field(default_factory=CO2Config)
    delayed: DelayedConfig = field(default_factory=DelayedConfig)
    """Of method delayed: co2 with another way to live with the delay."""
    slowmo: SlowMoConfig = field(default_factory=SlowMoConfig)
    overlap_local: OverlapLocalConfig = field(default_factory=OverlapLocalConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch_size: int = 64
    """Samples per optimiser step over all workers together (global)."""
    epochs: int = 10
    seed: int = 0
    accumulate: int = 1
    """Micro-batches per optimiser step and worker, to save memory; the same step but for BatchNorm, whose statistics
    are a micro-batch's, and for rounding."""
    recompute: bool = False
    """Keep only each block's input of the forward pass, and compute the rest again in the backward pass, to save
    memory; the result is the same."""
    average_buffers: bool = True
    """Average BatchNorm statistics with the parameters."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 runs the forward pass under autocast where the hardware has it; elsewhere it stays float32."""
    tf32: bool = True
    """On GPUs: TF32 for what is computed in float32."""
    cudnn_benchmark: bool = True
    """On GPUs: let cuDNN try its convolutions and keep the fastest."""
    channels_last: bool = True
    """On GPUs: images with their channels innermost, as convolutions on tensor cores want them."""
    per_node: int = 1
    """How many workers (consecutive ranks) make a node. They synchronise gradients at every step, and the method runs
    across nodes. 0 takes the workers that torchrun or SLURM started on one machine."""
    zero: Literal[0, 1, 2, 3] = 0
    """The ZeRO stage inside a node: 1 shares out the optimiser's state, 2 the gradients too, 3 the parameters too."""
    shard: bool = False
    """Share CO2's outer state out over all workers: 1 + 2 / workers copies of the parameters, not 3."""
    offload: bool = False
    """Keep CO2's outer state and its all-reduce in the host's memory: no copy of the parameters on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: float = 600.0
    """Seconds until a missing worker is an error."""
    link_mbit: float | None = None
    """Hold collectives back in software as a link of this many Mbit/s would; None for the real link."""
    out: Path | None = None
    """The run folder; runs/RECIPE-METHOD-seedSEED by default."""
    resume: bool = False
    """Continue from the run folder's newest checkpoint, if it has one."""
    eval_every: int = 1
    """Epochs between evaluations."""
    checkpoint_every: int = 1
    """Epochs between checkpoints; 0 for none but the last."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    trace: bool = False
    """Write a torch.profiler trace of two rounds to the run folder; it shows the all-reduce under the local steps."""
    dry_run: bool = False
    """Print the resolved recipe and the memory that a GPU needs, without training; WORLD_SIZE=128 LOCAL_WORLD_SIZE=8 in
    front of the command stand for that cluster."""
    gpu_gb: float | None = None
    """Of a dry run: warn where a GPU of so many GB (GiB, as makers count) is too small."""

    def __post_init__(self) -> None:
        least_of = {"epochs": 1, "eval_every": 1, "log_every": 1, "checkpoint_every": 0, "per_node": 0, "accumulate": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)}: give {least} or more")
        check_settings(self.method, self.co2, self.delayed, shard=self.shard, offload=self.offload)

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.name}-{self.method}-seed{self.seed}"


R = TypeVar("R", bound=Recipe)


def parse(recipes: Mapping[str, R], argv: Sequence[str] | None = None, prog: str = "train") -> R:
    """RECIPE [overrides] from the command line; every field of the recipe is an option. Rank 0 prints errors."""
    name, *overrides = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        listing = "\n".join(f"  {name}" for name in recipes)
        print(f"usage: {prog} RECIPE [overrides]\n\nrecipes:\n{listing}\n\n{prog} RECIPE --help lists its options")
        sys.exit(0)
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=3) or recipes
        raise UserError(f"recipe {name!r} does not exist; did you mean {', '.join(near)}?")
    default = dataclasses.replace(recipes[name], name=name)
    return tyro.cli(
        type(default),
        default=default,
        args=overrides,
        prog=f"{prog} {name}",
        use_underscores=True,
        console_outputs=rank() == 0,
        config=(tyro.conf.AvoidSubcommands,),
    )


def launch(main: Callable[[], None]) -> None:
    """Runs a train script's main: a user's mistake becomes one line and exit status 2, without a traceback."""
    try:
        main()
    except UserError as error:
        if _first_to_say(str(error)):
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.stderr.flush()
        os._exit(2)  # not sys.exit: peers may be waiting in a collective that will never complete


def dry_run(recipe: Recipe, build_model: Callable[[], nn.Module], backward: Backward | None = None) -> None:
    """Prints the resolved recipe, the model's size and, with `backward`, the memory that each GPU needs.

    The model is built on the meta device. backward: see training.memory.
    """
    with torch.device("meta"):
        model = build_model()
    if rank() == 0:
        print(json.dumps(dataclasses.asdict(recipe), indent=2, default=str))
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        share = per_worker(recipe.batch_size, world_size())
        print(f"{millions:.2f} M parameters, {world_size()} workers of {share} samples a step")
        if backward is not None:
            from training import memory  # here, because FakeTensorMode takes seconds to import

            print(*memory.lines(memory.estimate(recipe, build_model, backward, world_size()), recipe), sep="\n")


def _first_to_say(text: str) -> bool:
    """Whether no other worker that the same torchrun started has said `text`: each line is printed once."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    parent = Path(f"/proc/{os.getppid()}")
    started = parent.stat().st_mtime_ns if parent.exists() else 0  # tells two processes of one number apart
    launch = f"{os.environ['TORCHELASTIC_RUN_ID']} {os.getppid()} {started}"
    mark = hashlib.sha256(f"{launch}\n{text}".encode()).hexdigest()[:24]
    try:
        os.close(os.open(Path(tempfile.gettempdir(), f"co2-{mark}"), os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False
