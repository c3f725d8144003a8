"""reproduce.py: the rows that it runs, and the tables and stand-ins that it makes from run folders, checked by hand."""

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import reproduce
from core import UserError
from core.baselines.table import METHODS
from results.collect import collect, keep_stand_ins, load_recipe, read_run
from results.paper import SHORT, TABLES
from tests.e2e.test_slurm import table_row
from tests.imports import ROOT
from training.recipe import flat, parse

# -- tables from run folders ------------------------------------------------------------------------------------------


def make_run(folder: Path, task: str, name: str, *, results: dict[str, Any], workers: int = 128, **changes) -> None:
    """A finished run of a recipe, as training/loop/run.py leaves it. A stand-in of a table has four workers."""
    co2 = {key: changes.pop(key) for key in ("tau", "gap") if key in changes}
    recipe = load_recipe(task, name)
    recipe = replace(recipe, co2=replace(recipe.co2, **co2, allow_unstable="gap" in co2), out=folder, **changes)
    folder.mkdir(parents=True)
    config: dict[str, Any] = {"recipe": asdict(recipe), "world_size": workers, "commit": "abc1234"}
    for key, value in SHORT[task].items() if workers == 4 else ():
        *above, last = key.split(".")
        (config["recipe"][above[0]] if above else config["recipe"])[last] = value
    (folder / "config.json").write_text(json.dumps(config, default=str))
    summary = {"steps": 100, "steps_per_second": 2.0, "hidden_share": 0.9} | results
    (folder / "summary.json").write_text(json.dumps(summary))


def resnet50(folder: Path, top1: float, **changes: Any) -> None:
    make_run(folder, "vision", "imagenet_resnet50", results={"test_top1": top1}, **changes)


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Of a run's config.json."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def collected(folder: Path, *names: str) -> list[str]:
    tables = {name: TABLES[name] for name in names} or TABLES
    return list(collect(tables, folder))


def test_mean_and_deviation_over_seeds_beside_the_papers_value_and_a_line_for_each_tau_and_world(tmp_path: Path):
    for seed, top1, rate in ((0, 0.75, 2.0), (1, 0.76, 3.0), (2, 0.80, 4.0)):  # deviations -2, -1, 3: sd^2 = 14 / 2
        results = {"test_top1": top1, "steps_per_second": rate, "hidden_share": 0.9 + seed / 100}
        make_run(tmp_path / "x" / str(seed), "vision", "imagenet_resnet50", seed=seed, results=results)
    lines = collected(tmp_path, "imagenet")
    head = "| model | method | tau | workers | batch | seeds | top-1, % | samples/s | exposed | paper |"
    assert lines[2].startswith(head)
    measured = "| ResNet-50 | co2 | 48 | 128 | 8192 | 3 | 77.00 ± 2.65 | 24,576.0 | 9.0% | 77.14 ± 0.09 |"
    assert measured in lines and sum(line.startswith("| ResNet-50 | co2 |") for line in lines) == 1
    assert "| ResNet-50 | ddp |  |  |  |  | not run |  |  | 76.92 ± 0.05 |" in lines
    assert "| Swin-T | slowmo |  |  |  |  | not run |  |  |  |" in lines, "the paper's value is unknown: empty"
    assert "Commits: abc1234." in lines and not any("Not counted" in line for line in lines)
    # One seed has no deviation; other taus and worlds have their own lines.
    resnet50(tmp_path / "one" / "a", 0.75)
    resnet50(tmp_path / "one" / "b", 0.70, tau=24, seed=1)
    resnet50(tmp_path / "one" / "c", 0.65, workers=80, batch_size=8160)
    rows = [line for line in collected(tmp_path / "one", "imagenet") if line.startswith("| ResNet-50 | co2 |")]
    assert [row.split(" | ")[2:7] for row in rows] == [
        ["24", "128", "8192", "1", "70.00"],
        ["48", "80", "8160", "1", "65.00"],
        ["48", "128", "8192", "1", "75.00"],
    ]


def test_runs_that_are_no_fair_measurement_are_left_out_with_the_reason(tmp_path: Path):
    resnet50(tmp_path / "a", 0.75)
    resnet50(tmp_path / "again", 0.76)
    resnet50(tmp_path / "short", 0.77, epochs=9)
    resnet50(tmp_path / "no_penalty", 0.78, gap="none")
    make_run(tmp_path / "stopped", "vision", "imagenet_resnet50", results={"test_top1": 0.79, "stopped_by_signal": 10})
    make_run(tmp_path / "cifar", "vision", "cifar10_small", results={"test_top1": 0.8})
    make_run(tmp_path / "metricless", "vision", "imagenet_resnet50", seed=3, results={})
    resnet50(tmp_path / "unfinished", 0.81)
    (tmp_path / "unfinished" / "summary.json").unlink()
    resnet50(tmp_path / "damaged", 0.82)
    (tmp_path / "damaged" / "config.json").write_text("{")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('["of another program"]')
    (tmp_path / "foreign" / "summary.json").write_text("{}")
    lines = collected(tmp_path)
    assert sum("75.00" in line for line in lines) == 2  # its own table, tau
    assert not any(f"{value}.00" in line for value in range(76, 83) for line in lines)
    for name, reason in {
        "again": "seed 0 is there already",
        "short": "epochs=9 in place of 90",
        "no_penalty": "co2.allow_unstable=True in place of False, co2.gap=none in place of elementwise",
        "stopped": "it was stopped at step 100",
        "cifar": "no row trains cifar10_small with co2",
        "metricless": "no test_top1 in summary.json",
        "unfinished": "it has no summary.json: not finished",
    }.items():
        assert f"Not counted: {tmp_path / name}: {reason}." in lines
    for name in ("damaged", "foreign"):
        start = f"Not counted: {tmp_path / name}: config.json or summary.json is damaged"
        assert any(line.startswith(start) for line in lines)


def test_a_resumed_run_has_the_commits_of_all_its_parts_and_an_extended_one_is_no_measurement(tmp_path: Path):
    resnet50(tmp_path / "a", 0.75)
    history = [{"changed": [], "step": 10, "commit": commit} for commit in ("abc1234", "def5678")]
    edit(tmp_path / "a", lambda config: config.update(history=history))
    assert "Commits: abc1234, def5678." in collected(tmp_path, "imagenet")
    edit(tmp_path / "a", lambda config: config["recipe"].update(extend=True))
    lines = collected(tmp_path, "imagenet")
    assert f"Not counted: {tmp_path / 'a'}: extend=True in place of False." in lines
    assert "| ResNet-50 | co2 |  |  |  |  | not run |  |  | 77.14 ± 0.09 |" in lines


def test_a_run_older_than_a_field_had_its_default(tmp_path: Path):
    """What the recipe itself sets otherwise by now is a departure still."""
    make_run(tmp_path / "vit", "vision", "imagenet_vit_base", results={"test_top1": 0.8})
    resnet50(tmp_path / "resnet", 0.75)
    for name in ("vit", "resnet"):
        for key in ("repeats", "elastic"):
            edit(tmp_path / name, lambda config, key=key: config["recipe"].pop(key))
        edit(tmp_path / name, lambda config: config["recipe"]["co2"].pop("outlier"))
    lines = collected(tmp_path, "imagenet")
    assert any(line.startswith("| ResNet-50 | co2 | 48 |") and "75.00" in line for line in lines)
    assert f"Not counted: {tmp_path / 'vit'}: repeats=1 in place of 3." in lines


def test_stand_ins_are_stored_with_the_settings_that_a_row_needs(tmp_path: Path):
    small = {"task": "vision", "name": "digits_small", "workers": 4}
    make_run(tmp_path / "runs/a", **small, results={"test_top1": 0.9})
    make_run(tmp_path / "runs/b", **small, seed=1, results={"test_top1": 0.8})
    make_run(tmp_path / "runs/other", **small, gap="none", results={"test_top1": 0.1})  # counts in no row of imagenet
    shown = "\n".join(keep_stand_ins(["imagenet", "tau_vision"], tmp_path / "runs", tmp_path))
    for label in ("ResNet-50", "tau 6"):  # tables share runs
        assert f"| {label}: digits_small | co2 | 6 | 4 | 64 | 2 | 85.00 ± 7.07 |" in shown
    rows = json.loads((tmp_path / "imagenet.json").read_text())
    assert [(row["folder"], row["test_top1"], row["commit"]) for row in rows] == [
        ("a", 0.9, "abc1234"),
        ("b", 0.8, "abc1234"),
    ]
    assert rows[1]["settings"]["seed"] == 1 and rows[0]["settings"]["co2.gap"] == "elementwise"
    assert not {"out", "device", "ddp_compression.format"} & rows[0]["settings"].keys()


def test_throughput_and_its_ratios_by_hand(tmp_path: Path):
    for nodes, rate in ((1, 4.0), (2, 2.0), (16, 1.0)):  # steps of 32, 64 and 512 samples of 1,024 tokens
        changes = {"epochs": 1, "batch_size": 32 * nodes, "tau": 12, "workers": 8 * nodes}
        results = {"val_perplexity": 9.0, "steps_per_second": rate}
        make_run(tmp_path / f"a-tcp-{nodes}", "language", "gpt2_large_owt", results=results, **changes)
    lines = collected(tmp_path, "throughput")
    assert "| 16 GPUs | co2 | 12 | 16 | 64 | 1 | 131,072 | 128.0 | 10.0% |  |" in lines
    assert "| co2 | 12 | 0.50 | 0.25 | 0.86 |" in lines  # 512 / (8 x 128), 512 / (16 x 128)
    assert "| ddp |  | not run | not run | 0.82 |" in lines
    assert "| 128 GPUs | co2 | 48 | 128 |  |  | not run |  |  | 304,736 |" in lines
    assert "| slowmo | 48 | not run | not run |  |" in lines
    other = collected(tmp_path, "throughput_roce")
    assert "| 16 GPUs | co2 | 12 | 16 |  |  | not run |  |  |  |" in other
    assert f"Not counted: {tmp_path / 'a-tcp-2'}: not over roce, by its folder's name." in other


def test_the_first_steps_do_not_count_in_the_throughput(tmp_path: Path):
    resnet50(tmp_path / "a", 0.75)
    lines = [{"step": 1, "seconds": 100.0}, {"step": 10, "seconds": 109.0}, {"step": 100, "seconds": 121.5}]
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 1'
    (tmp_path / "a" / "metrics.jsonl").write_text(text)  # 90 steps in 12.5 s, of 8192 samples
    run = read_run(tmp_path / "a")
    assert not isinstance(run, str) and run.results["samples_per_second"] == 90 / 12.5 * 8192
    (tmp_path / "a" / "metrics.jsonl").write_text(json.dumps(lines[0]))
    run = read_run(tmp_path / "a")
    assert not isinstance(run, str) and run.results["samples_per_second"] == 2 * 8192


THROUGHPUT = ["throughput", "throughput_roce"]
ROWS = [(name, row) for name, table in TABLES.items() for row in table.rows]


# -- the rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["vision", "segmentation", "pointcloud", "language"])
def test_every_row_names_recipes_a_script_and_a_method_that_exist(task: str):
    rows = [row for _, row in ROWS if row.task == task]
    assert rows
    for row in rows:
        reproduce.load_recipe(task, row.recipe)
        assert row.local is None or reproduce.load_recipe(task, row.local)
        assert row.method in METHODS
        for cluster in reproduce.NODES:
            script = ROOT / "slurm" / f"{row.script}_{cluster}.sh"
            assert f"source slurm/task.sh {row.script} {cluster} " in script.read_text()
        module, recipes = table_row(f"slurm/{row.script}_a100.sh")
        assert module == f"{task}.train" and row.recipe in recipes


def test_every_recipe_of_the_papers_tasks_is_in_a_row_and_every_row_has_a_stand_in_or_its_table_a_reason():
    """All but stand-ins, and recipes that the paper has not."""
    stand_ins = ("small", "digits", "cifar10")
    stand_ins += ("shapenet55_mae", "gpt2_medium_zo", "gpt2_small_wikitext103", "imagenet_resnet50_nodes")
    for task in ("vision", "segmentation", "pointcloud", "language"):
        recipes = importlib.import_module(f"{task}.recipes")
        names = {name for name in recipes.RECIPES if not name.endswith("_small") and not name.startswith(stand_ins)}
        assert names - {row.local for _, row in ROWS} == {row.recipe for _, row in ROWS if row.task == task}
    for name, table in TABLES.items():
        without = [row for row in table.rows if not row.local]
        assert not without or "stand-in" in table.note, f"{name}: {without[0].label}"


@pytest.mark.parametrize("cluster", reproduce.NODES)
def test_no_two_jobs_share_a_run_folder_unless_they_are_one(cluster: reproduce.Cluster):
    jobs: dict[str, tuple] = {}
    for _, row in ROWS:
        for seed in row.seeds:
            variables, command = reproduce.submission(row, cluster, seed)
            assert jobs.setdefault(variables["OUT"], (variables, command)) == (variables, command)


OF_EACH_TASK = {table.rows[0].task: name for name, table in TABLES.items() if name not in THROUGHPUT}.values()
OTHERS = TABLES.keys() - {*OF_EACH_TASK, *THROUGHPUT}


@pytest.mark.parametrize("name", [*OF_EACH_TASK, *(pytest.param(o, marks=pytest.mark.slow) for o in sorted(OTHERS))])
def test_the_stand_ins_commands_are_understood_by_the_train_scripts(name: str):
    folders = []
    for row in TABLES[name].rows:
        if row.local:
            folder, command = reproduce.stand_in(row, workers=4, seed=1)
            module = command.index("-m", 2) + 1
            recipes = {row.local: reproduce.load_recipe(row.task, row.local)}
            recipe = parse(recipes, command[module + 1 :])
            assert command[module] == f"{row.task}.train" and "--nproc-per-node=4" in command[:module]
            assert (recipe.method, recipe.seed, recipe.out, recipe.resume) == (row.method, 1, folder, True)
            before, after = (flat(asdict(r)) for r in (recipes[row.local], recipe))
            wanted = before | ({"co2.tau": row.tau} if row.tau else {}) | reproduce.stand_in_overrides(row)
            outer = [name for name in before if name.startswith(("co2.", "ddp_compression."))]
            assert {name: after[name] for name in outer} == {name: wanted[name] for name in outer}
            assert wanted.keys() == before.keys(), "an override of nothing"
            folders.append(folder)
    assert len(folders) == len(set(folders)) > 0


# -- the command --------------------------------------------------------------------------------------------------


Told = Callable[..., list[str]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """The lines that the command prints, by its arguments."""

    def run_main(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *arguments])
        reproduce.main()
        return capsys.readouterr().out.splitlines()

    return run_main


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an sbatch of such lines of bash on the path."""

    def make(text: str) -> None:
        (tmp_path / "sbatch").write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "sbatch").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def test_list_names_every_table_and_a_dry_run_prints_a_line_a_row_and_seed(told: Told):
    assert [line.split()[0] for line in told("list")] == list(TABLES)
    lines = told("throughput", "--dry-run")
    assert len(lines) == 15 and all(line.startswith("NCCL_IB_DISABLE=1 RECIPE=gpt2_large_owt ") for line in lines)
    name = "gpt2_large_owt-co2-tau48-16nodes-tcp-epochs_1-seed0"
    sbatch = f" sbatch --nodes=16 --job-name={name} --dependency=singleton slurm/gpt2_a100.sh --epochs 1"
    assert lines[5].endswith(sbatch) and " TAU=48 BATCH_SIZE=512 " in lines[5]
    lines = told("gap", "--local", "--workers", "2", "--seeds", "5,6,7", "--dry-run")  # of no run here
    assert len(lines) == 6 and all("--nproc-per-node=2 -m language.train gpt2_pydoc_small" in line for line in lines)
    assert all("-2workers --resume" in line for line in lines), "not the folders of four"


def test_rows_methods_and_seeds_are_chosen_and_options_passed_on(told: Told):
    chosen = ["--dry-run", "--rows", "resnet50,vitbase", "--methods", "co2,ddp", "--seeds", "0,7"]
    lines = told("imagenet", *chosen, "--", "--optim.lr", "0.5", "--co2.tau=24")
    words = [[part.split("=") for part in line.split()[:6]] for line in lines]
    got = [tuple(value for key, value in of if key in ("RECIPE", "METHOD", "SEED")) for of in words]
    recipes = ("imagenet_resnet50", "imagenet_vit_base")
    assert got == [(recipe, method, seed) for recipe in recipes for method in ("ddp", "co2") for seed in "07"]
    assert all(line.endswith("slurm/vision_a100.sh --optim.lr 0.5") and " TAU=24 " in line for line in lines)
    assert "OUT=runs/a100/imagenet_resnet50-co2-tau24-16nodes-lr_0.5-seed7 " in lines[3], "a folder of its own"
    few = ["--dry-run", "--local", "--rows"]
    (line,) = told("gpt2", *few, "gpt2-small", "--methods", "local", "--seeds", "7")
    assert told("gpt2", *few, "gpt2_pydoc_small", "--methods", "local", "--seeds", "7") == [line], "by its stand-in"
    (longer,) = told("roberta", *few, "roberta_pydoc_small", "--methods", "local", "--seeds", "7")
    assert " --epochs 2 --epoch_steps 660 " in longer
    assert " --epochs 1 --epoch_steps 660 " in line and "--out runs/local/language-gpt2_pydoc_small-local-tau6-" in line
    (line,) = told("tau_language", *few, "tau12", "--seeds", "0", "--", "--epochs", "2")
    assert " --method co2 --co2.tau 12 --epochs 2 " in line and "-co2-tau12-epochs_2-" in line


def finish(root: Path, name: str, tau: int, hours: float, *, seed: int = 0, done: bool = True) -> Path:
    """A run of ResNet-50 in the folder that reproduce.py gives it."""
    row = next(row for row in TABLES["imagenet"].rows if (row.label, row.method) == ("ResNet-50", name))
    folder = root / reproduce.submission(row, "a100", seed)[0]["OUT"]
    make_run(folder, "vision", "imagenet_resnet50", method=name, tau=tau, seed=seed, results={"test_top1": 0.7})
    (folder / "metrics.jsonl").write_text(f'{{"step": 100, "seconds": {hours * 3600 / 128}}}\n')
    if not done:
        (folder / "summary.json").unlink()
    return folder


def test_status_shows_what_ran_and_what_is_left_and_what_is_finished_is_not_submitted_again(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    done = finish(tmp_path, "co2", 48, 30.0)
    finish(tmp_path, "co2", 48, 12.0, seed=1, done=False)
    lines = told("imagenet", "--status", "--rows", "resnet50")
    assert "| imagenet | ResNet-50 | co2 |  | 1 | 1 | 1 | 42.0 | 30.0 |" in lines
    assert "| imagenet | ResNet-50 | ddp |  | 0 | 0 | 3 | 0.0 |  |" in lines
    lines = told("imagenet", "--dry-run", "--rows", "resnet50", "--methods", "co2")
    assert lines[0] == f"# finished: {done.relative_to(tmp_path)}"
    assert [line.split("SEED=")[1][0] for line in lines[1:]] == ["1", "2"], "what was begun goes on"


def test_an_array_has_a_line_for_each_job(told: Told, sbatch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sbatch(f'echo "$JOBS $*" >> {tmp_path}/submitted')
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    told("gap", "--array", "4", "--seeds", "0,1", "--", "--epochs", "3")
    jobs, *submitted = (tmp_path / "submitted").read_text().split()
    assert submitted == ["--nodes=8", "--job-name=gap-gpt2_a100-8nodes", "--array=0-3%4", "slurm/gpt2_a100.sh"]
    lines = (tmp_path / jobs).read_text().splitlines()
    begin = "export RECIPE=gpt2_small_owt METHOD=co2 TAU=48 BATCH_SIZE=512 SEED=1"
    assert len(lines) == 4 and lines[1].startswith(begin)
    assert lines[1].endswith("seed1; JOB_ARGS=(--co2.gap none --co2.allow_unstable --epochs 3)")


ROW = "for row 'ResNet-50', method ddp"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["imagnet", "--dry-run"], "table 'imagnet' does not exist; did you mean imagenet?"),
        (["imagenet", "--methods", "diloco"], "imagenet has no row with --rows '' and --methods 'diloco'"),
        (["imagenet", "--seeds=-1"], "--seeds -1: give numbers up to"),
        (["imagenet", "--", "--seed", "3"], "--seed behind --: reproduce.py chooses it itself, see --seeds"),
        (
            ["imagenet", "--", "--epochss", "3"],
            f"behind --: vision.train, {ROW}: Unrecognized options: --epochss, 3; did you mean --epochs",
        ),
        (
            ["imagenet", "--methods", "ddp", "--", "--co2.outer_lr", "0.5"],
            f"{ROW}: co2.outer_lr=0.5 is method co2's own",
        ),
        (["--collect", "nowhere"], "--collect nowhere: no such folder; name"),
        (["gap"], "no sbatch here: --dry-run prints the lines"),
    ],
)
def test_a_mistake_is_one_clear_line(told: Told, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError) as error:
        told(*arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_jobs_are_submitted_with_their_environment(told: Told, sbatch: Any, tmp_path: Path):
    sbatch(f'echo "$TAU $NCCL_IB_DISABLE $*" >> {tmp_path}/jobs\n[ "$TAU $SEED" = "48 0" ]')
    with pytest.raises(UserError, match="sbatch refused this job"):  # the first with tau 12
        told("throughput")
    jobs = (tmp_path / "jobs").read_text().splitlines()
    assert jobs[0].startswith("48 1 --nodes=1 --job-name=") and jobs[0].endswith(" slurm/gpt2_a100.sh --epochs 1")
    assert [job.split()[0] for job in jobs] == ["48"] * 6 + ["12"]


# -- --local: the small runs that stand for the rows ------------------------------------------------------------------


def test_local_runs_what_is_missing_and_stops_at_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[Path] = []

    def train(arguments: list[str], cwd: Path) -> Any:
        assert arguments[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        started.append(Path(arguments[arguments.index("--out") + 1]))
        if len(started) < 3:
            seed = int(started[-1].name[-1])
            make_run(tmp_path / started[-1], "language", "gpt2_pydoc_small", seed=seed, workers=4, results={})
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(sys, "argv", ["reproduce.py", "gap", "--local"])
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    monkeypatch.setattr(reproduce, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(reproduce.subprocess, "Popen", train)
    done, *_ = TABLES["gap"].rows
    folder, _ = reproduce.stand_in(done, 4, seed=0)
    make_run(tmp_path / folder, "language", "gpt2_pydoc_small", results={})
    with pytest.raises(UserError, match=r"language-gpt2_pydoc_small-co2-tau6-.*-seed0 is not finished"):
        reproduce.main()
    assert [path.name[-5:] for path in started] == ["seed1", "seed2", "seed0"], "seed 0 without penalty was there"
