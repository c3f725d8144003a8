"""Recipes from the command line, how a mistake is reported, what a dry run refuses as a run does."""

import errno
import functools
import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from core import CO2Config, CompressionConfig, UserError
from core.baselines import SlowMoConfig
from reproduce import NODES, fitting_batch
from results.paper import GPUS
from tests.runs import Plain
from tests.scripts import refused
from tests.training.test_memory import SMALLER
from training import checks
from training import launch as launcher
from training.checks import check_batch_norm, check_start, dry_run
from training.data.samples import smallest_part
from training.loop import run
from training.loop.run import Run
from training.optim import backward_in_parts
from training.recipe import Recipe, momentum_note, parse
from training.start.script import launch
from training.weights.read import read_recipe


@dataclass(frozen=True)
class Toy(Recipe):
    """A recipe of a test."""

    width: int = 3


RECIPES = {"toy_a": Toy(), "toy_b": Toy(width=5), "toy_small": Toy(co2=CO2Config(tau=6), recommended=True)}


def test_overrides_reach_every_level():
    options = "--method co2 --co2.tau 24 --co2.clip None --optim.lr 0.3"
    recipe = parse(RECIPES, ["toy_b", *options.split()])
    assert (recipe.name, recipe.width, recipe.method) == ("toy_b", 5, "co2")
    assert (recipe.co2.tau, recipe.co2.clip, recipe.optim.lr) == (24, None, 0.3)
    assert recipe.folder == Path("runs/toy_b-co2-seed0")


def test_an_unknown_recipe_suggests_the_near_one_and_lists_no_others():
    with pytest.raises(UserError, match="recipe 'toy_' does not exist; did you mean toy_"):
        parse(RECIPES, ["toy_"])
    with pytest.raises(UserError) as error:
        parse(RECIPES, ["zzz"], prog="toy.train")
    assert str(error.value) == "recipe 'zzz' does not exist; `python -m toy.train --help` lists them"


@pytest.mark.parametrize("task", ["vision", "segmentation", "pointcloud", "language"])
def test_help_lists_what_is_needed_first_and_help_all_lists_the_rest(
    task: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    # under pytest, tyro checks a tenth of its cache's hits, and its keys confuse the defaults False and 0.0
    monkeypatch.setattr("random.random", lambda: 1.0)
    recipes = importlib.import_module(f"{task}.recipes").RECIPES

    def listed(option: str) -> set[str]:
        with pytest.raises(SystemExit):
            parse(recipes, [next(iter(recipes)), option])
        return set(re.findall(r"^[^\w\n] (--[a-z][a-z0-9_.]*)", capsys.readouterr().out, re.M))

    first, all_options = listed("--help"), listed("--help-all")
    assert len(first) < 60 and first < all_options
    assert {"--method", "--co2.tau", "--optim.lr", "--out", "--resume"} <= first
    assert {"--co2.compression.lgreco.rule", "--slowmo.outer_lr", "--optim.betas", "--tf32"} <= all_options - first
    option = ["--co2.tau", "auto", "--co2.tau_max", "7"]  # an option that --help leaves out
    assert parse(recipes, [next(iter(recipes)), *option]).co2.tau_max == 7


def test_settings_of_the_own_method_and_what_a_recipe_brings_are_not_refused():
    slowmo = parse(RECIPES, ["toy_a", "--method", "slowmo", "--slowmo.outer_momentum", "0.1", "--co2.tau", "3"])
    assert slowmo.slowmo.outer_momentum == 0.1
    assert parse(RECIPES, ["toy_a", "--method", "ddp", "--co2.tau", "3"]).co2.tau == 3
    own = {"toy": replace(Toy(), slowmo=SlowMoConfig(outer_momentum=0.3))}
    assert parse(own, ["toy", "--method", "co2"]).slowmo.outer_momentum == 0.3


PAPER = CO2Config(tau=6)


@pytest.mark.parametrize(
    ("options", "recommended", "co2"),
    [
        ([], True, replace(CO2Config.recommended(), tau=6)),
        (["--co2.tau", "4", "--co2.delay=1"], True, replace(CO2Config.recommended(), tau=4, delay=1)),
        (["--no_recommended"], False, PAPER),
        (["--no-recommended", "--co2.clip", "0.5"], False, replace(PAPER, clip=0.5)),
        (["--method", "slowmo"], False, PAPER),
        (["--method=diloco"], False, PAPER),
        (["--elastic", "--per_node=2"], True, replace(CO2Config.recommended(), tau=6)),
    ],
)
def test_a_small_recipe_takes_the_recommended_settings_where_they_go(options, recommended, co2, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipe = parse(RECIPES, ["toy_small", *options])
    assert (recipe.recommended, recipe.co2) == (recommended, co2)


def test_the_recommended_settings_are_another_recipes_when_asked_for_alone():
    assert parse(RECIPES, ["toy_a"]).co2 == CO2Config()
    assert parse(RECIPES, ["toy_a", "--recommended"]).co2 == replace(CO2Config.recommended(), tau=48)
    with pytest.raises(UserError, match="recommended is CO2's own, method 'ddp' does not have it"):
        parse(RECIPES, ["toy_a", "--recommended", "--method", "ddp"])


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Toy(zero=1), "zero=1 with 1 worker per node has nothing to shard"),
        (Toy(device="cuda", link_mbit=50.0), "device=cuda: torch sees no CUDA device here"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(recipe: Toy, said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with refused(said):
        dry_run(recipe, lambda _: nn.Linear(1, 1))


def test_a_dry_run_in_one_process_leaves_the_number_of_workers_open(capsys: pytest.CaptureFixture):
    for per_node in (0, 8):
        dry_run(Toy(zero=2, per_node=per_node), lambda _: nn.Linear(1, 1))
    assert capsys.readouterr().out.count("M parameters") == 2
    with pytest.raises(UserError, match="zero=2 with 1 worker"):
        dry_run(Toy(zero=2), lambda _: nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--epochs", "0"], "epochs=0: give 1 or more"),
        (["--method", "dpd"], "ddp"),
        (["--co2.clip", "0.1", "--method", "local"], "co2.clip=0.1 is method co2's own, method 'local' does not have"),
        (["--co2.tau_max", "5", "--co2.tau", "3"], "co2.tau_max=5 limits only tau auto, and co2.tau is 3: leave"),
        (["--out=."], "out='' is the folder that you are in: name one"),
        (["--epoch", "3"], "Unrecognized options: --epoch, 3; did you mean --epochs"),
        (["--epochs"], "Missing value for argument '--epochs'"),
        (["--epochs", "x y"], "--epochs: invalid literal for int() with base 10: 'x y' (--help lists the options)"),
        ([f"--{'long/' * 30}a"], f"Unrecognized options: --{'long/' * 30}a (--help lists the options)"),
    ],
)
def test_bad_options_are_one_line_with_a_remedy(options: list[str], said: str, capsys: pytest.CaptureFixture):
    with refused(said):
        parse(RECIPES, ["toy_a", *options])
    assert capsys.readouterr() == ("", "")


def raises(error: BaseException) -> None:
    raise error


def fills_a_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("a line")


MISTAKE, ROOM = "error: no such folder 'x': make it", "make room or choose another --out"
ENDS: dict[str, tuple[Callable[[], None], int, str]] = {  # what main does, the exit status, what is said
    "a mistake": (lambda: raises(UserError(MISTAKE[7:])), 2, f"{MISTAKE}\n"),
    "Ctrl-C": (lambda: raises(KeyboardInterrupt()), 130, ""),
    "a large file": (
        lambda: raises(OSError(errno.EFBIG, "File too large", "run/events")),
        *(2, f"error: run/events: File too large; {ROOM}\n"),
    ),
    "a full disk": (fills_a_disk, 2, f"error: the run folder: No space left on device; {ROOM}\n"),
}


@pytest.mark.parametrize("what", ENDS)
def test_launch_ends_without_a_traceback(what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    main, code, said = ENDS[what]
    launch(main)
    assert codes == [code] and capsys.readouterr().err == said


def test_torchrun_is_told_what_went_wrong_and_the_launcher_says_it(tmp_path, monkeypatch, capsys):
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("CO2_LAUNCH", "1")
    launch(ENDS["a mistake"][0])
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    assert failure.message["message"] == MISTAKE and failure.timestamp > 0
    assert codes == [2] and capsys.readouterr().err == "", "training.launch says it"
    monkeypatch.setattr("sys.argv", ["launch", "-m", "vision.train"])
    monkeypatch.setattr(launcher, "run", lambda _: raises(ChildFailedError("vision.train", {0: failure})))
    with pytest.raises(SystemExit, match="2"):
        launcher.main()
    assert capsys.readouterr().err == f"{MISTAKE}\n"


@pytest.mark.parametrize(("status", "said"), [(1, "first to fail"), (-9, "killed by signal 9")])
def test_a_worker_that_fails_is_one_line_of_its_launcher(status: int, said: str, monkeypatch, capsys):
    failed = ProcessFailure(local_rank=1, pid=1, exitcode=status, error_file="")
    monkeypatch.setattr("sys.argv", ["launch", "-m", "vision.train"])
    monkeypatch.setattr(launcher, "run", lambda _: raises(ChildFailedError("vision.train", {1: failed})))
    with pytest.raises(SystemExit, match="1"):
        launcher.main()
    assert capsys.readouterr().err == f"error: worker 1 was {said}: see what the workers print\n"


@pytest.mark.parametrize(
    "option",
    ["--nnodes 0", "--nnodes 1:x", "--nnodes 3:2", "--nproc-per-node 0", "--nproc-per-node -1", "--master-port 65536"]
    + ["--max-restarts -1", "--node-rank 1", "--node-rank -1"],
)
@pytest.mark.parametrize("elastic", [[], ["--elastic"]])
def test_the_launcher_refuses_numbers_that_cannot_be(option: str, elastic: list[str], monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["launch", *option.split(), "-m", "vision.train", *elastic])
    with pytest.raises(SystemExit, match="2"):
        launcher.main()
    assert capsys.readouterr().err.startswith(f"error: {option}: give ")


@pytest.mark.parametrize(("workers", "usual"), [(1, None), (4, 0), (16, 0), (17, 0.2), (64, 0.5), (80, None)])
def test_another_outer_momentum_than_the_releases_is_noted(workers: int, usual: float | None):
    """The default of the authors' release: 0, 0.2, 0.5, 0.6 for up to 16, 32, 64 and more GPUs."""
    said = momentum_note(Recipe(co2=CO2Config(outer_momentum=0.6)), workers)
    wanted = f"for {workers} workers (--co2.outer_momentum {usual})"
    assert said.endswith(wanted) if usual is not None else not said
    assert not momentum_note(Recipe(method="ddp", co2=CO2Config(outer_momentum=0.6)), workers)
    assert not momentum_note(Recipe(co2=CO2Config(outer_lr=0.5, outer_momentum=0.4)), workers), "another pair"


# -- what a run refuses before its first step a dry run refuses, too --------------------------------------------------


TASKS = ("vision", "segmentation", "pointcloud", "language")
EVERY_RECIPE = [(task, name) for task in TASKS for name in importlib.import_module(f"{task}.recipes").RECIPES]
FULL = ("imagenet", "ade20k", "shapenet", "_owt", "_wikibooks", "_wikitext103")


@functools.cache  # on the meta device, once for both clusters
def build(task: str, name: str) -> nn.Module:
    script, pad = importlib.import_module(f"{task}.train"), {"pad": 1} if task == "language" else {}
    return script.make_model(script.RECIPES[name], **pad)


@pytest.mark.parametrize("cluster", NODES)
@pytest.mark.parametrize(("task", "name"), EVERY_RECIPE)
def test_every_recipe_starts_on_its_clusters_or_is_refused_in_one_line(task, name, cluster, monkeypatch, capsys):
    """With the batch that slurm/'s scripts give it (tests/e2e/test_slurm.py), a small one on four workers; and with its
    own."""
    recipe, gpus = importlib.import_module(f"{task}.recipes").RECIPES[name], NODES[cluster] * GPUS
    workers = gpus if any(mark in name for mark in FULL) else 4
    monkeypatch.setenv("WORLD_SIZE", str(workers))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(GPUS))
    fit = replace(recipe, batch_size=fitting_batch(recipe, workers))
    dry_run(fit, lambda _: build(task, name))
    shown, rest = capsys.readouterr().out.split("\n}\n")
    settings = json.loads(shown[shown.index("{") :] + "}")  # mmcv prints at its import, too
    assert settings["batch_size"] == fit.batch_size and float(rest.split()[0]) > 0.03
    (needs,) = re.findall(r"([\d.]+) GiB a GPU\b", rest)
    assert float(needs) < 24 or name in [larger for larger, _ in SMALLER]
    assert f"{workers} workers of {fit.batch_size // fit.data_workers(workers)} samples" in rest
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    try:
        dry_run(recipe, lambda _: nn.Linear(1, 1))
    except UserError as error:
        (line,) = str(error).splitlines()
        assert re.search(r"over \d+ workers: (choose a positive multiple of \d+, such as|.* Mixup .*; give) \d+", line)


@pytest.mark.parametrize("name", ["check_start", "check_batch_norm"])
def test_a_run_asks_the_functions_that_a_dry_run_asks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise UserError("no")

    for module in (checks, run):
        monkeypatch.setattr(module, name, refuse)
    recipe = Plain(out=tmp_path)
    with pytest.raises(UserError, match="^no$"):
        dry_run(recipe, lambda _: nn.Linear(1, 1))
    with pytest.raises(UserError, match="^no$"), Run(recipe) as started:
        started.shard(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 100}, r"batch_size=100 \(global\) over 16 workers: .*, such as 96$"),
        ({"per_node": 3}, "per_node=3 does not divide 16 workers"),
        (
            {"method": "ddp", "per_node": 8, "zero": 2, "ddp_compression": CompressionConfig("int8")},
            "ddp_compression.format='int8' with",
        ),
    ],
)
def test_what_does_not_go_with_the_workers_is_refused_before_the_run(changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        check_start(Plain(**changes), 16)


class Norm(nn.Sequential):
    def __init__(self, kind: type[nn.Module] = nn.BatchNorm1d):
        super().__init__(nn.Linear(2, 2), kind(2))


@pytest.mark.parametrize(
    ("batch", "workers", "accumulate", "message"),
    [
        (128, 128, 1, r"batch_size=128 \(global\) over 128 workers: BatchNorm .* a worker; give 256 or more"),
        (128, 128, 4, "two samples a worker; give 256 or more"),
        (256, 128, 2, "^accumulate=2 with .*: BatchNorm .* in each part .*, and one part has one; give --accumulate 1"),
        (7, 1, 3, "a worker's 7, and one part has one; give --accumulate 2"),  # 3, 3, 1; with 2: 4, 3
        (6, 1, 3, ""),
    ],
)
def test_batch_norm_needs_two_samples_in_each_part(batch: int, workers: int, accumulate: int, message: str):
    """So does torch, in the step itself."""
    recipe = Plain(batch_size=batch, accumulate=accumulate)
    check_batch_norm(recipe, nn.Linear(1, 1), workers)
    check_batch_norm(recipe, Norm(nn.SyncBatchNorm), workers)
    parts = torch.randn(batch // workers, 2).chunk(accumulate)
    assert min(map(len, parts)) == smallest_part(batch // workers, accumulate)
    model = Norm()
    if not message:
        check_batch_norm(recipe, model, workers)
        backward_in_parts(model, parts, lambda part: {"train_loss": model(part).sum()})
        return
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        backward_in_parts(model, parts, lambda part: {"train_loss": model(part).sum()})
    with pytest.raises(UserError, match=message):
        check_batch_norm(recipe, model, workers)


# -- runs that other commands read ------------------------------------------------------------------------------------

STORED = {"name": "toy", "method": "ddp", "batch_size": 4}
DAMAGED = [
    ({"recipe": STORED, "world_size": "x"}, "world_size='x' is no number of workers): give the folder of a run"),
    ({"recipe": STORED, "world_size": 0}, "world_size=0 is no number of workers"),
    ({"recipe": STORED | {"batch_size": "4"}, "world_size": 1}, "config.json is damaged ("),
    (
        {"recipe": STORED | {"epochs": -1}, "world_size": 1, "commit": "abc"},
        "config.json: this version refuses its settings (epochs=-1: give 1 or more): check out commit abc to read it",
    ),
    (
        {"recipe": STORED | {"emd": 3}, "world_size": 1, "commit": "abc", "command": ["/x/training/train.py"]},
        "is a run of recipe toy with emd=3, a setting that is gone: check out commit abc to read it",
    ),
    (
        {"recipe": STORED | {"emd": 3}, "world_size": 1, "command": ["/x/vision/train.py"]},
        "with emd=3, a setting that training does not have: use its own task's command",
    ),
    ({"recipe": STORED | {"co2": []}, "world_size": 1}, "([] in place of settings)"),
]


@pytest.mark.parametrize(("config", "said"), DAMAGED)
def test_a_damaged_config_of_another_run_is_one_line(config: dict[str, Any], said: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=re.escape(said)):
        read_recipe(tmp_path, Recipe)
