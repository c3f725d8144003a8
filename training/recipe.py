"""Recipes: what a run is made of, read from the command line."""

import dataclasses
import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from core import CO2Config, UserError
from core.elastic.joining import check_elastic
from core.methods import REGISTRY, check_settings, spec_of
from training.data import paths_from_home
from training.layouts.layout import Layout
from training.optim import OptimConfig
from training.script import launch
from training.workers import rank, world_size

SHARES = {"shard", "offload", "per_node", "zero", "layout"}  # options with which not all recommended settings go
LARGEST = 10**9  # number of a recipe
SELDOM = {  # options that only --help-all lists, by the part of the recipe; None hides the whole part
    "": "tf32 cudnn_benchmark channels_last extend gpu_gb timeout trace",
    "co2": "allow_unstable tau_max mix",
    "optim": "betas eps undecayed power min_lr_share",
    "ddp_compression": "error_feedback like lgreco",
    "co2.compression": "error_feedback like lgreco",
    "autoencoder": "encoder_widths folding_width mlp_widths",
    "diloco": None,
    "overlap_local": None,
    "rings": None,
    "slowmo": None,
    "zeroth": None,
}
MethodName = Literal[tuple(REGISTRY)]  # a task may register more
OfMethods = dataclasses.make_dataclass(
    "OfMethods",
    [
        (own.key, Annotated[own.config, tyro.conf.arg(help=own.help)], field(default_factory=own.config))
        for own in (spec_of(name).settings for name in REGISTRY)
        if own is not None
    ],
    frozen=True,
)


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"co2": {"tau": 6}} -> {"co2.tau": 6}."""
    items: dict[str, Any] = {}
    for key, value in nested.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return items


@dataclass(frozen=True)
class Recipe(OfMethods):
    """The settings that every recipe has; a task adds its model and data. The command line shows these docstrings."""

    name: tyro.conf.Suppress[str] = ""
    layout: ClassVar[str] = ""
    """How the model lies on its workers, where a task knows layouts (training/layouts/layout.py)."""
    least_part: ClassVar[int] = 2
    """Samples that BatchNorm needs at once; 1 where it is taken over the many points of each sample."""
    method: MethodName = "co2"
    """How the workers are kept together. The period of every local method is co2.tau."""
    co2: CO2Config = field(default_factory=CO2Config)
    recommended: bool = False
    """Start from CO2Config.recommended, at the recipe's tau, instead of the paper's settings; --co2.* change it. Small
    recipes do so by themselves, with method co2 and outer state that is not shared out; --no_recommended for not."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch_size: int = 64
    """Samples per optimiser step over all workers together (global)."""
    epochs: int = 10
    seed: int = 0
    accumulate: int = 1
    """Micro-batches per optimiser step and worker, to save memory; the same step but for BatchNorm, whose statistics
    are a micro-batch's, which so needs two samples, and for rounding."""
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
    compile: bool = False
    """torch.compile the model: the same up to rounding, and faster after the minutes that it takes at the start. Off by
    default, for no speed on a GPU was measured; on a CPU it needs a C++ compiler."""
    per_node: int = 1
    """How many workers (consecutive ranks) make a node. They synchronise gradients at every step, and the method runs
    across nodes. 0 takes the workers that torchrun or SLURM started on one machine."""
    zero: Literal[0, 1, 2, 3] = 0
    """The ZeRO stage inside a node: 1 shares out the optimiser's state, 2 the gradients too, 3 the parameters too."""
    shard: bool = False
    """Share CO2's outer state out over all workers: 1 + 2 / workers copies of the parameters, not 3."""
    offload: bool = False
    """Keep CO2's outer state and its all-reduce in the host's memory: no copy of the parameters on a GPU."""
    elastic: bool = False
    """Go on without a worker that dies, and let it come back: of method co2, under python -m training.launch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: float = 600.0
    """Seconds until a missing worker is an error."""
    link_mbit: float | None = None
    """Hold collectives back in software as a link of this many Mbit/s would; None for the real link."""
    out: Path | None = None
    """The run folder; runs/RECIPE-METHOD-seedSEED by default."""
    resume: bool = False
    """Continue from the run folder's newest checkpoint, if it has one."""
    extend: bool = False
    """With resume: accept another number of epochs, or of steps in them. The learning rate goes on as in a run of that
    length, its schedule stretched: config.json says so from then on, and reproduce.py --collect counts it in no row."""
    eval_every: int | float = 1
    """Epochs between evaluations; 0.1: ten in each."""
    checkpoint_every: int = 1
    """Epochs between checkpoints; 0 for none but the last."""
    save_minutes: float = 0.0
    """Minutes between checkpoints, beside checkpoint_every; 0 for none by time."""
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
        self.check_least(epochs=1, batch_size=1, log_every=1, accumulate=1, seed=0, checkpoint_every=0, per_node=0)
        numbers = {k: v for k, v in flat(dataclasses.asdict(self)).items() if isinstance(v, int | float)}
        for name, value in numbers.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{name}={value}: give a finite number")
        for ok, name, remedy in (
            (self.eval_every > 0, "eval_every", "epochs, or a part of one, above 0"),
            (self.save_minutes >= 0, "save_minutes", "minutes, or 0 for none by time"),
            (self.gpu_gb is None or self.gpu_gb > 0, "gpu_gb", "the GB of a GPU, above 0"),
            (0 < self.timeout <= LARGEST, "timeout", f"seconds, above 0 and up to {LARGEST}"),
            (self.link_mbit is None or self.link_mbit > 0, "link_mbit", "a rate above 0, or None for the real link"),
        ):
            if not ok:
                raise UserError(f"{name}={getattr(self, name)}: give {remedy}")
        for name, value in numbers.items():
            if abs(value) > LARGEST:
                raise UserError(f"{name}={value}: give {LARGEST} or less")
        check_settings(self.method, self.co2, shard=self.shard, offload=self.offload, **self.own_settings)
        if not self.elastic:
            return
        if "elastic" not in spec_of(self.method).takes:
            raise UserError(f"elastic does not go with method={self.method!r}: give --method co2, or no elastic")
        for name, needed in (("per_node", 1), ("zero", 0), ("shard", False), ("offload", False)):
            if (value := getattr(self, name)) != needed:
                raise UserError(f"elastic does not go with {name}={value!r}: give {name}={needed!r}, or no elastic")
        check_elastic(self.co2)

    def check(self, **ranges: tuple[float, float]) -> None:
        """Refuses a field outside its range, both ends of which belong to it."""
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise UserError(f"{name}={getattr(self, name)}: give a number from {least:g} to {most:g}")

    def check_least(self, **least: int) -> None:
        """Refuses a field below its least value, where it is not None."""
        for name, value in least.items():
            if (found := getattr(self, name)) is not None and found < value:
                raise UserError(f"{name}={found}: give {value} or more")

    def check_share(self, workers: int) -> None:
        """Refuses a worker's part of a batch that the task cannot train on."""

    def data_workers(self, workers: int) -> int:
        """How many of these workers take different data: under a layout several take the same."""
        return Layout.parse(self.layout).data_workers if self.layout else workers

    @property
    def own_settings(self) -> dict[str, Any]:
        """The method's own, under its key, as make_method takes them."""
        own = spec_of(self.method).settings
        if own and not hasattr(self, own.key):
            raise UserError(f"method={self.method!r} is not of this task: choose another method")
        return {own.key: getattr(self, own.key)} if own else {}

    def eval_steps(self, epoch: int) -> int:
        """Steps between evaluations, of the steps of an epoch."""
        return max(1, round(epoch * self.eval_every))

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.name}-{self.method}-seed{self.seed}"


R = TypeVar("R", bound=Recipe)
T = TypeVar("T")


def parse(recipes: Mapping[str, R], argv: Sequence[str] | None = None, prog: str = "train") -> R:
    """RECIPE [overrides] from the command line; every field of the recipe is an option. Rank 0 prints errors."""
    name, *overrides = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        listing = "\n".join(f"  {name}" for name in recipes)
        print(f"usage: {prog} RECIPE [overrides]\n\nrecipes:\n{listing}\n\n{prog} RECIPE --help lists its options")
        sys.exit(0)
    default = dataclasses.replace(find("recipe", name, recipes, f"`python -m {prog} --help` lists them"), name=name)
    default = starting_point(default, overrides)
    shown, note = default, None
    if "--help-all" in overrides:
        overrides = ["--help"]
    elif {"-h", "--help"} & {*overrides}:
        shown, note = without_seldom(default), "--help-all lists all options, with other methods' settings."
    recipe = tyro.cli(
        type(shown),
        default=shown,
        args=overrides,
        prog=f"{prog} {name}",
        description=note,
        use_underscores=True,
        console_outputs=rank() == 0,
        config=(tyro.conf.AvoidSubcommands,),
    )
    recipe = paths_from_home(recipe)
    if recipe.out == Path():
        raise UserError("out='' is the folder that you are in: name one of the run's own, such as runs/mine")
    refuse_unused(recipe, default)
    if recipe.layout:
        Layout.parse(recipe.layout).check_recipe(recipe)
    return recipe


def without_seldom(default: T, part: str = "") -> T:
    """Returns equal settings of a class whose help leaves out the options in SELDOM."""
    hidden = (SELDOM.get(part) or "").split()
    fields: list[Any] = []
    for f in dataclasses.fields(default):  # pyright: ignore[reportArgumentType]
        name, value = f"{part}.{f.name}".lstrip("."), getattr(default, f.name)
        if f.name in hidden or SELDOM.get(name, "") is None:
            fields.append((f.name, tyro.conf.Suppress[Any], field(default=value)))
        elif name in SELDOM or any(key.startswith(f"{name}.") for key in SELDOM):
            shown = without_seldom(value, name)
            fields.append((f.name, type(shown), field(default=shown)))
    kind = dataclasses.make_dataclass(type(default).__name__, fields, bases=(type(default),), frozen=True)
    kind.__doc__ = type(default).__doc__
    given = {f.name: getattr(default, f.name) for f in dataclasses.fields(kind)}
    return kind(**given | {name: f.default for name, kind, f in fields})


def find(kind: str, name: str, known: Mapping[str, T], lists: str) -> T:
    """The entry of that name; else a UserError, which names similar ones, or where they are listed."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        raise UserError(f"{kind} {name!r} does not exist; " + (f"did you mean {', '.join(near)}?" if near else lists))
    return known[name]


def answer_help(recipes: Mapping[str, Recipe], prog: str) -> None:
    """Prints the help that the command line asks for, and exits, before a train script's slow imports."""
    if not sys.argv[1:] or {"-h", "--help", "--help-all"} & set(sys.argv[1:]):
        launch(lambda: sys.exit(parse(recipes, prog=prog) is None))


def starting_point(recipe: R, overrides: Sequence[str]) -> R:
    """The recipe with those settings of CO2, the recommended ones or its own, that `overrides` change."""
    given = dict[str, str]()  # option -> its value, if it has one
    for word, following in zip(overrides, [*overrides, ""][1:], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given[name.replace("-", "_")] = value if equals else following
    if given.get("layout") and "method" not in given:  # whose name says it
        recipe = dataclasses.replace(recipe, method=Layout.parse(given["layout"]).method)
    method = given.get("method", recipe.method)
    if "recommended" in given and method != "co2":
        raise UserError(f"recommended is CO2's own, method {method!r} does not have it: leave it out")
    usual = recipe.recommended and method == "co2" and not given.keys() & SHARES and "no_recommended" not in given
    if "recommended" not in given and not usual:
        return dataclasses.replace(recipe, recommended=False)
    co2 = dataclasses.replace(CO2Config.recommended(world_size()), tau=recipe.co2.tau)
    return dataclasses.replace(recipe, recommended=True, co2=co2)


def refuse_unused(recipe: Recipe, default: Recipe) -> None:
    """Refuses settings of another method than the recipe's. Local methods share co2.tau, and most co2.compression."""
    shared = {"tau", "tau_max"} | ({"compression"} & spec_of(recipe.method).takes)
    keys = {name: entry.settings.key for name, entry in REGISTRY.items() if entry.settings}
    owners = [(key, [name]) for name, key in keys.items() if hasattr(recipe, key)]  # other tasks may have more methods
    for part, methods in [*owners, ("co2", [entry.name for entry in REGISTRY.values() if entry.reads_co2])]:
        of_default, of_recipe = getattr(default, part), getattr(recipe, part)
        names = [f.name for f in dataclasses.fields(of_recipe) if part != "co2" or f.name not in shared]
        given = {k: v for k in names if (v := getattr(of_recipe, k)) != getattr(of_default, k)}
        if given and recipe.method not in methods:
            key, value = next(iter(given.items()))
            raise UserError(
                f"{part}.{key}={value!r} is method {methods[0]}'s own, method {recipe.method!r} does not have it: "
                f"leave it out, or add --method {methods[0]}"
            )


def momentum_note(recipe: Recipe, workers: int) -> str:
    """A note where CO2's outer momentum differs from the authors' release for so many workers, or nothing."""
    c, usual = recipe.co2, CO2Config.recommended(workers).outer_momentum
    as_released = recipe.method == "co2" and workers > 1 and c.outer_lr == 1 and c.merge == "restart"
    if not as_released or c.outer_momentum == usual:
        return ""
    return (
        f"note: outer_momentum={c.outer_momentum}; the authors' release sets {usual:g} for {workers} workers: add "
        f"--co2.outer_momentum {usual:g} for it"
    )
