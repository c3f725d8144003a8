"""Recipes: the settings of a run, read from the command line."""

import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from core import CO2Config, UserError
from core.baselines.table import REGISTRY, check_settings, spec_of
from training.layout import Layout
from training.optim import OptimConfig
from training.start.script import launch, parse_options

LARGEST = 10**9  # limit of the numbers in a recipe
SELDOM = {  # options that only --help-all lists, by the part of the recipe; None hides the whole part
    "": "tf32 extend gpu_gb timeout trace tracker link_mbit light_checkpoints",
    "co2": "allow_unstable fragments tau_max",
    "optim": "betas eps undecayed power min_lr_share layer_decay",
    "ddp_compression": "like lgreco",
    "co2.compression": "like lgreco",
    "autoencoder": "encoder_widths folding_width mlp_widths",
    "diloco": None,
    "overlap_local": None,
    "rings": None,
    "slowmo": None,
    "zeroth": None,
}
MethodName = Literal[tuple(REGISTRY)]  # a task may register more methods
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
    """Flattens nested settings, such as `{"co2": {"tau": 6}}` to `{"co2.tau": 6}`."""
    items: dict[str, Any] = {}
    for key, value in nested.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return items


@dataclass(frozen=True)
class Recipe(OfMethods):
    """The settings that all recipes share. Each task adds settings of its model and data."""

    name: tyro.conf.Suppress[str] = ""
    layout: ClassVar[str] = ""
    """How the model is laid out on its workers, in tasks that support layouts (training/layout.py)."""
    least_part: ClassVar[int] = 2
    """Samples that BatchNorm needs at once. It is 1 if BatchNorm averages over the many points of each sample."""
    batch_norm: ClassVar[bool] = True
    """Whether a model of the task may have BatchNorm."""
    method: MethodName = "co2"
    """Training method. All local methods use co2.tau as their number of local steps."""
    co2: CO2Config = field(default_factory=CO2Config)
    recommended: bool = False
    """Start from CO2Config.recommended with the recipe's tau, instead of our reading of the paper's rule. Options
    --co2.* then change it. Small recipes do so by default with method co2; --no_recommended turns it off."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch_size: int = 64
    """Samples per optimizer step over all workers (global)."""
    epochs: int = 10
    """Passes over the training set."""
    init_from: Path | None = None
    """Initial weights: a run folder, a local file of timm or mmseg, or a folder of transformers. None: random ones."""
    seed: int = 0
    """Seed of initialization, data order and augmentation."""
    accumulate: int = 1
    """Micro-batches per optimizer step and worker, to save memory. The step is the same up to rounding, except for
    BatchNorm and dropout: BatchNorm's statistics come from a micro-batch, which needs two samples. With either of them,
    it cannot change on --resume."""
    recompute: bool = False
    """Keep only each block's input in the forward pass and compute the rest again in the backward pass, to save memory.
    The result is the same."""
    ema: float | None = None
    """Decay of a running average of the weights (EMA), such as 0.9999, which evaluations and exports then use."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the forward pass. bfloat16 uses autocast if the hardware supports it, and float32 otherwise. float16
    uses autocast on GPUs, and scales the loss."""
    tf32: bool = True
    """On GPUs, use TF32 for float32 computations."""
    loader_workers: int = 0
    """Processes per worker that load and augment data. With 0 the worker itself does so."""
    per_node: int = 1
    """Number of workers (consecutive ranks) per node. They synchronize gradients at every step, and the method runs
    across nodes. 0 means the workers that torchrun or Slurm started on one machine."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage inside a node. 1 shards the optimizer's state, 2 also the gradients, 3 also the parameters."""
    shard: bool = False
    """Shard CO2's outer state over all workers, at the cost of an all-gather of the outer iterate in each round."""
    offload: bool = False
    """Keep CO2's outer state and its all-reduce in the host's memory, without a copy of the parameters on a GPU."""
    elastic: bool = False
    """Continue without a worker that dies, and let it rejoin. For method co2, started by python -m training.launch or
    core.elastic.launch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto uses a GPU if there is one."""
    timeout: float = 600.0
    """Seconds until a missing worker is an error."""
    link_mbit: float | None = None
    """Emulate a link of this many Mbit/s by delaying collectives in software. None uses the real link."""
    out: Path | None = None
    """The run folder. The default is runs/RECIPE-METHOD-seedSEED."""
    resume: bool = False
    """Continue from the run folder's newest checkpoint, if it has one."""
    extend: bool = False
    """With --resume, accept another number of epochs, or of steps per epoch. The learning rate continues as in a run of
    the new length. config.json records it, and reproduce.py --collect leaves the run out of its tables."""
    eval_every: int | float | str = 1
    """Epochs between evaluations, or steps or minutes: 0.1, 500steps, 30minutes."""
    checkpoint_every: int | float | str = 1
    """Epochs, steps or minutes between checkpoints. With 0 only the last checkpoint is written."""
    light_checkpoints: bool = False
    """Leave out of checkpoints the error-feedback residuals, and the optimizer's moments of all nodes but the first,
    with which a resume then starts all nodes. An elastic run's checkpoint holds one worker's state anyway."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    trace: bool = False
    """Write a torch.profiler trace of two rounds to the run folder. It shows the all-reduce during the local steps."""
    tracker: str | None = None
    """Log to wandb or mlflow too. Their environment variables say where, such as WANDB_MODE=offline."""
    dry_run: bool = False
    """Print the resolved recipe and the memory that a GPU needs, without training. Put WORLD_SIZE=128
    LOCAL_WORLD_SIZE=8 before the command to see the result for that cluster."""
    gpu_gb: float | None = None
    """In a dry run, warn if a GPU with this many GB (GiB, as makers count) is too small."""

    def __post_init__(self) -> None:
        self.check_least(epochs=1, batch_size=1, log_every=1, accumulate=1, seed=0, per_node=0)
        self.check(loader_workers=(0, 1000))
        numbers = {k: v for k, v in flat(dataclasses.asdict(self)).items() if isinstance(v, int | float)}
        for name, value in numbers.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{name}={value}: give a finite number")
        for ok, name, remedy in (
            (max(self.interval("eval_every", 1)) > 0, "eval_every", "epochs, 500steps or 30minutes, above 0"),
            (min(self.interval("checkpoint_every", 1)) >= 0, "checkpoint_every", "epochs, 500steps, 30minutes, or 0"),
            (self.ema is None or 0 < self.ema < 1, "ema", "a decay between 0 and 1"),
            (self.tracker in (None, "wandb", "mlflow"), "tracker", "wandb or mlflow"),
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
        whole = self.method != "zo" and self.zero < 2 and not self.layout
        if self.light_checkpoints and self.layout:
            raise UserError("light_checkpoints does not go with a layout, which leaves out residuals: leave it out")
        for name in ("ema", "precision"):
            if (value := getattr(self, name)) not in (None, "float32", "bfloat16") and not whole:
                raise UserError(f"{name}={value} does not go with method zo, zero above 1 or a layout: leave it out")
        if not self.elastic:
            return
        if "elastic" not in spec_of(self.method).takes:
            raise UserError(f"elastic does not go with method={self.method!r}: give --method co2, or no elastic")
        self.leave_out("does not go with elastic", zero=0, shard=False, offload=False)
        if self.interval("eval_every", 1)[1]:
            raise UserError(f"elastic does not go with eval_every={self.eval_every}: give epochs or steps")

    def check(self, **ranges: tuple[float, float]) -> None:
        """Refuses a field outside its range. Both ends belong to the range."""
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise UserError(f"{name}={getattr(self, name)}: give a number from {least:g} to {most:g}")

    def check_least(self, **least: int) -> None:
        """Refuses a field below its smallest value, unless it is None."""
        for name, value in least.items():
            if (found := getattr(self, name)) is not None and found < value:
                raise UserError(f"{name}={found}: give {value} or more")

    def leave_out(self, why: str, **needed: Any) -> None:
        """Refuses a field that has another value than the one it needs, and says why."""
        for name, value in needed.items():
            if (given := getattr(self, name)) != value:
                raise UserError(f"{name}={given!r} {why}: leave it out")

    def check_share(self, workers: int) -> None:
        """Refuses a worker's share of a batch that the task cannot train on."""

    def data_workers(self, workers: int) -> int:
        """Returns how many of these workers get different data. Under a layout several workers get the same data."""
        return Layout.parse(self.layout).data_workers if self.layout else workers

    @property
    def own_settings(self) -> dict[str, Any]:
        """The method's own settings, under their key, as make_method takes them."""
        own = spec_of(self.method).settings
        if own and not hasattr(self, own.key):
            raise UserError(f"method={self.method!r} is not of this task: choose another method")
        return {own.key: getattr(self, own.key)} if own else {}

    def interval(self, name: str, epoch: int) -> tuple[int, float]:
        """Returns the steps and the minutes of eval_every or checkpoint_every, one of which is 0.

        An epoch has `epoch` steps.
        """
        value = getattr(self, name)
        found = re.fullmatch(r"(-?[\d.]+(?:e[+-]?\d+)?)(epochs|steps|minutes|)", str(value))
        try:
            number, unit = float(found[1]), found[2]  # type: ignore[index]
        except (TypeError, ValueError):
            remedy = "give a number of epochs, or a number with a unit, such as 500steps or 30minutes"
            raise UserError(f"{name}={value}: {remedy}") from None
        if unit == "minutes":
            return 0, number
        steps = number * (1 if unit == "steps" else epoch)
        return (max(1, round(steps)) if steps > 0 else round(steps)), 0.0

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.name}-{self.method}-seed{self.seed}"


R = TypeVar("R", bound=Recipe)
T = TypeVar("T")


def parse(recipes: Mapping[str, R], argv: Sequence[str] | None = None, prog: str = "train") -> R:
    """Returns the recipe of the command line, RECIPE [overrides]. Every field is an option."""
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
    recipe = parse_options(
        type(shown),
        default=shown,
        args=overrides,
        prog=f"{prog} {name}",
        description=note,
        use_underscores=True,
        config=(tyro.conf.AvoidSubcommands,),
    )
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
            kind = Annotated[type(shown), *getattr(f.type, "__metadata__", (None,))]  # with its help, if it has any
            fields.append((f.name, kind, field(default=shown)))
    kind = dataclasses.make_dataclass(type(default).__name__, fields, bases=(type(default),), frozen=True)
    kind.__doc__ = type(default).__doc__
    given = {f.name: getattr(default, f.name) for f in dataclasses.fields(kind)}
    return kind(**given | {name: f.default for name, kind, f in fields})


def find(kind: str, name: str, known: Mapping[str, T], lists: str) -> T:
    """Returns the entry of that name, or raises UserError with similar names or the place that lists them."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        raise UserError(f"{kind} {name!r} does not exist; " + (f"did you mean {', '.join(near)}?" if near else lists))
    return known[name]


def answer_help(recipes: Mapping[str, Recipe], prog: str) -> None:
    """Prints the help that the command line asks for and exits, before a train script's slow imports."""
    if not sys.argv[1:] or {"-h", "--help", "--help-all"} & set(sys.argv[1:]):
        launch(lambda: sys.exit(parse(recipes, prog=prog) is None))


def starting_point(recipe: R, overrides: Sequence[str]) -> R:
    """Returns the recipe with the CO2 settings, recommended or its own, that `overrides` then change."""
    given = dict[str, str]()  # option -> its value, or the word after it
    for word, following in zip(overrides, [*overrides, ""][1:], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given[name.replace("-", "_")] = value if equals else following
    if given.get("layout") and "method" not in given:  # the layout names the method
        recipe = dataclasses.replace(recipe, method=Layout.parse(given["layout"]).method)
    method = given.get("method", recipe.method)
    if "recommended" in given and method != "co2":
        raise UserError(f"recommended is CO2's own, method {method!r} does not have it: leave it out")
    usual = recipe.recommended and method == "co2" and "no_recommended" not in given
    if "recommended" not in given and not usual:
        return dataclasses.replace(recipe, recommended=False)
    co2 = dataclasses.replace(CO2Config.recommended(), tau=recipe.co2.tau)
    return dataclasses.replace(recipe, recommended=True, co2=co2)


def refuse_unused(recipe: Recipe, default: Recipe) -> None:
    """Refuses settings of other methods than the recipe's, and co2.tau_max with a given tau.

    Local methods share co2.tau, and most co2.compression.
    """
    shared = {"tau"} | ({"compression"} & spec_of(recipe.method).takes)
    keys = {name: entry.settings.key for name, entry in REGISTRY.items() if entry.settings}
    owners = [(key, [name]) for name, key in keys.items() if hasattr(recipe, key)]  # tasks differ in their methods
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
    if recipe.co2.tau != "auto" and (most := recipe.co2.tau_max) != default.co2.tau_max:
        raise UserError(f"co2.tau_max={most} limits only tau auto, and co2.tau is {recipe.co2.tau}: leave one out")


def momentum_note(recipe: Recipe, workers: int) -> str:
    """Returns a note if CO2's outer momentum differs from the default of the authors' release, or ""."""
    of_release = (16, 0.0), (32, 0.2), (64, 0.5), (math.inf, 0.6)  # for so many workers at most
    c, usual = recipe.co2, next(momentum for most, momentum in of_release if workers <= most)
    as_released = recipe.method == "co2" and workers > 1 and c.outer_lr == 1 and c.merge == "restart"
    if not as_released or c.outer_momentum == usual:
        return ""
    return (
        f"note: outer_momentum={c.outer_momentum}; the authors' default is {usual:g} for {workers} workers "
        f"(--co2.outer_momentum {usual:g})"
    )
