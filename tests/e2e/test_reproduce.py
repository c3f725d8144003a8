"""reproduce.py: the rows that it runs, and the tables that it makes from run folders, checked by hand."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import reproduce
from core import UserError
from core.methods import METHODS
from results.paper import TABLES
from training.recipe import parse

ROOT = Path(__file__).resolve().parents[2]
ROWS = [(name, row) for name, table in TABLES.items() for row in table.rows]

# Every number of the paper that we know, as the project's sources state them: (table, model, method, tau).
PAPER = {
    ("imagenet", "ResNet-50", "ddp", None): (76.92, 0.05),
    ("imagenet", "ResNet-50", "co2", None): (77.14, 0.09),
    ("imagenet", "ViT-Base", "ddp", None): (81.33, 0.04),
    ("imagenet", "ViT-Base", "co2", None): (80.95, 0.08),
    ("gpt2", "GPT-2 Small", "slowmo", None): (7.34, 0.89),
    ("gpt2", "GPT-2 Small", "co2", None): (7.37, 0.73),
    ("transnormer", "7B", "ddp", None): (16.82, None),
    ("gap", "without", "co2", None): (7.56, None),
    ("gap", "with", "co2", None): (7.39, None),
    ("throughput", "8 GPUs", "ddp", None): (18444, None),
    ("throughput", "16 GPUs", "ddp", None): (3488, None),
    ("throughput", "128 GPUs", "ddp", None): (22810, None),
    ("throughput", "128 GPUs", "co2", 48): (304736, None),
}


def make_run(
    folder: Path, task: str, name: str, *, workers: int = 128, results: dict[str, Any], **changes: Any
) -> None:
    """A finished run of a recipe, as training/run.py leaves it."""
    co2 = {key: changes.pop(key) for key in ("tau", "gap") if key in changes}
    recipe = reproduce.load_recipe(task, name)
    recipe = replace(recipe, co2=replace(recipe.co2, **co2, allow_unstable="gap" in co2), out=folder, **changes)
    folder.mkdir(parents=True)
    config = {"recipe": asdict(recipe), "world_size": workers, "commit": "abc1234"}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    summary = {"steps": 100, "steps_per_second": 2.0, "hidden_share": 0.9} | results
    (folder / "summary.json").write_text(json.dumps(summary))


def resnet50(folder: Path, top1: float, **changes: Any) -> None:
    make_run(folder, "vision", "imagenet_resnet50", results={"test_top1": top1}, **changes)


def collected(folder: Path, *names: str) -> list[str]:
    tables = {name: TABLES[name] for name in names} or TABLES
    return list(reproduce.collect(tables, folder))


# -- the rows -----------------------------------------------------------------------------------------------------


def test_the_papers_values_are_those_known_and_no_others():
    given = {(name, row.label, row.method, row.tau): row.paper for name, row in ROWS if row.paper}
    assert given == PAPER
    assert TABLES["throughput"].paper_ratio == {None: 0.82, 48: 1.06, 12: 0.86}
    assert not any(table.paper_ratio for name, table in TABLES.items() if name != "throughput")


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
            assert f"launch {task}.train" in script.read_text()


def test_every_recipe_of_the_papers_tasks_is_in_a_row():
    """All but the stand-ins, and ShapeNet-55, which is Point-MAE's own set."""
    stand_ins = ("small", "digits", "cifar10", "shapenet55_mae")
    for task in ("vision", "segmentation", "pointcloud", "language"):
        recipes = importlib.import_module(f"{task}.recipes")
        names = {name for name in recipes.RECIPES if not name.endswith("_small") and not name.startswith(stand_ins)}
        assert names == {row.recipe for _, row in ROWS if row.task == task}


def test_every_table_of_models_has_a_stand_in():
    assert [name for name, table in TABLES.items() if not table.has_stand_ins] == ["throughput"]


def test_a_jobs_line_holds_all_that_its_row_says():
    small, _ = TABLES["gap"].rows
    variables, command = reproduce.submission(small, "a100", seed=2)
    assert command == ["sbatch", "--nodes=8", "slurm/gpt2_a100.sh", "--co2.gap", "none", "--co2.allow_unstable"]
    assert variables == {
        "RECIPE": "gpt2_small_owt",
        "METHOD": "co2",
        "TAU": "48",
        "BATCH_SIZE": "512",  # 480 does not divide by 64
        "SEED": "2",
        "OUT": "runs/a100/gpt2_small_owt-co2-tau48-8nodes-gap_none-seed2",
    }


@pytest.mark.parametrize(("cluster", "batch_size"), [("a100", "8192"), ("3090", "8160")])
def test_the_batch_is_rounded_to_divide_by_the_clusters_gpus(cluster: reproduce.Cluster, batch_size: str):
    variables, _ = reproduce.submission(TABLES["imagenet"].rows[0], cluster, seed=0)
    assert variables["BATCH_SIZE"] == batch_size


@pytest.mark.parametrize("cluster", reproduce.NODES)
def test_no_two_jobs_share_a_run_folder_unless_they_are_one(cluster: reproduce.Cluster):
    jobs: dict[str, tuple] = {}
    for _, row in ROWS:
        for seed in row.seeds:
            variables, command = reproduce.submission(row, cluster, seed)
            assert jobs.setdefault(variables["OUT"], (variables, command)) == (variables, command)


@pytest.mark.parametrize("name", [name for name in TABLES if name != "throughput"])
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
            before, after = (reproduce.flat(asdict(r)) for r in (recipes[row.local], recipe))
            wanted = before | reproduce.stand_in_overrides(row)
            outer = [name for name in before if name.startswith(("co2.", "delayed."))]
            assert {name: after[name] for name in outer} == {name: wanted[name] for name in outer}
            assert wanted.keys() == before.keys(), "an override of nothing"
            folders.append(folder)
    assert len(folders) == len(set(folders)) > 0


# -- collecting ---------------------------------------------------------------------------------------------------


def test_mean_and_deviation_over_seeds_beside_the_papers_value(tmp_path: Path):
    for seed, top1, rate in ((0, 0.75, 2.0), (1, 0.76, 3.0), (2, 0.80, 4.0)):  # deviations -2, -1, 3: sd^2 = 14 / 2
        results = {"test_top1": top1, "steps_per_second": rate, "hidden_share": 0.9 + seed / 100}
        make_run(tmp_path / "x" / str(seed), "vision", "imagenet_resnet50", seed=seed, results=results)
    lines = collected(tmp_path, "imagenet")
    assert lines[2].startswith(
        "| model | method | tau | workers | batch | seeds | top-1, % | samples/s | exposed | paper |"
    )
    measured = "| ResNet-50 | co2 | 48 | 128 | 8192 | 3 | 77.00 ± 2.65 | 24,576.0 | 9.0% | 77.14 ± 0.09 |"
    assert measured in lines
    assert sum(line.startswith("| ResNet-50 | co2 |") for line in lines) == 1
    assert "| ResNet-50 | ddp |  |  |  |  | not run |  |  | 76.92 ± 0.05 |" in lines
    assert "| Swin-T | slowmo |  |  |  |  | not run |  |  |  |" in lines, "the paper's value is unknown: empty"
    assert "Commits: abc1234." in lines
    assert not any("Not counted" in line for line in lines)


def test_one_seed_has_no_deviation_and_other_taus_and_worlds_have_their_own_lines(tmp_path: Path):
    resnet50(tmp_path / "a", 0.75)
    resnet50(tmp_path / "b", 0.70, tau=24, seed=1)
    resnet50(tmp_path / "c", 0.65, workers=80, batch_size=8160)
    rows = [line for line in collected(tmp_path, "imagenet") if line.startswith("| ResNet-50 | co2 |")]
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
    assert sum("75.00" in line for line in lines) == 2  # in its own table and in that of wire formats
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


def test_settings_of_unused_methods_and_of_the_loader_do_not_matter(tmp_path: Path):
    resnet50(tmp_path / "a", 0.75, method="ddp", tau=3, loader_workers=2, eval_every=7)
    (line,) = [line for line in collected(tmp_path, "imagenet") if line.startswith("| ResNet-50 | ddp |")]
    assert line == "| ResNet-50 | ddp |  | 128 | 8192 | 1 | 75.00 | 16,384.0 | 10.0% | 76.92 ± 0.05 |"


def test_a_run_without_the_penalty_goes_to_its_own_row(tmp_path: Path):
    for folder, changes in (("with", {}), ("without", {"gap": "none"})):
        results = {"val_perplexity": 20.0 if changes else 10.0}
        make_run(
            tmp_path / folder, "language", "gpt2_small_owt", workers=64, batch_size=512, results=results, **changes
        )
    lines = collected(tmp_path, "gap")
    assert "| without | co2 | 48 | 64 | 512 | 1 | 20.00 | 1,024.0 | 10.0% | 7.56 |" in lines
    assert "| with | co2 | 48 | 64 | 512 | 1 | 10.00 | 1,024.0 | 10.0% | 7.39 |" in lines
    assert any("| 10.00 |" in line for line in collected(tmp_path, "gpt2")), "the same run is a row of another table"


def test_a_row_of_64_gpus_takes_no_run_of_128(tmp_path: Path):
    make_run(tmp_path / "a", "language", "gpt2_small_owt", workers=128, batch_size=512, results={"val_perplexity": 9.0})
    assert f"Not counted: {tmp_path / 'a'}: 128 workers in place of 64." in collected(tmp_path, "gpt2")


def test_stand_ins_have_a_table_of_their_own_without_the_papers_values(tmp_path: Path):
    make_run(tmp_path / "a", "vision", "digits_small", workers=4, results={"test_top1": 0.9})
    lines = collected(tmp_path, "imagenet")
    assert "| ResNet-50: digits_small | co2 | 6 | 4 | 64 | 1 | 90.00 | 128.0 | 10.0% |" in lines
    assert "| ViT-Base: digits_vit | co2 |  |  |  |  | not run |  |  |" in lines
    assert "| ResNet-50 | co2 |  |  |  |  | not run |  |  | 77.14 ± 0.09 |" in lines


def test_throughput_and_its_ratios_by_hand(tmp_path: Path):
    for nodes, rate in ((1, 4.0), (2, 2.0), (16, 1.0)):  # steps of 32, 64 and 512 samples of 1,024 tokens
        changes = {"epochs": 1, "batch_size": 32 * nodes, "tau": 12, "workers": 8 * nodes}
        results = {"val_perplexity": 9.0, "steps_per_second": rate}
        make_run(tmp_path / str(nodes), "language", "gpt2_large_owt", results=results, **changes)
    lines = collected(tmp_path, "throughput")
    assert "| 16 GPUs | co2 | 12 | 16 | 64 | 1 | 131,072 | 128.0 | 10.0% |  |" in lines
    assert "| co2 | 12 | 0.50 | 0.25 | 0.86 |" in lines  # 512 / (8 x 128), 512 / (16 x 128)
    assert "| ddp |  | not run | not run | 0.82 |" in lines
    assert "| 128 GPUs | co2 | 48 | 128 |  |  | not run |  |  | 304,736 |" in lines


# -- the command --------------------------------------------------------------------------------------------------


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *arguments])
    reproduce.main()


def test_list_names_every_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    run_main(monkeypatch, "list")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(TABLES)


def test_dry_run_prints_a_line_a_row_and_seed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    run_main(monkeypatch, "throughput", "--dry-run")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9 and all(line.startswith("NCCL_IB_DISABLE=1 RECIPE=gpt2_large_owt ") for line in lines)
    assert (
        lines[5].endswith(" sbatch --nodes=16 slurm/gpt2_a100.sh --epochs 1") and " TAU=48 BATCH_SIZE=512 " in lines[5]
    )
    run_main(monkeypatch, "gap", "--local", "--workers", "2", "--dry-run")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all("--nproc-per-node=2 -m language.train gpt2_pydoc_small" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["imagnet", "--dry-run"], "table 'imagnet' does not exist; did you mean imagenet?"),
        (["xyz"], "table 'xyz' does not exist; did you mean imagenet, ade20k,"),
        (["--collect", "nowhere"], "--collect nowhere: no such folder; name"),
        (["--collect", str(ROOT / "slurm")], "no run folder in it, at any depth"),
        (["gap"], "no sbatch here: --dry-run prints the lines"),
        (["throughput", "--local"], "throughput has no stand-ins: it needs a cluster"),
    ],
)
def test_a_mistake_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError) as error:
        run_main(monkeypatch, *arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_bad_folder_ends_with_status_2_and_no_traceback():
    command = [sys.executable, str(ROOT / "reproduce.py"), "--collect", "nowhere"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith("error: --collect nowhere: ")
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_jobs_are_submitted_with_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = tmp_path / "sbatch"
    fake.write_text(f'#!/bin/bash\necho "$TAU $NCCL_IB_DISABLE $*" >> {tmp_path}/jobs\n[ "$TAU $SEED" = "48 0" ]\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(UserError, match="sbatch refused this job"):  # the first with tau 12
        run_main(monkeypatch, "throughput")
    jobs = (tmp_path / "jobs").read_text().splitlines()
    assert jobs[0] == "48 1 --nodes=1 slurm/gpt2_a100.sh --epochs 1"
    assert [job.split()[0] for job in jobs] == ["48"] * 6 + ["12"]


def test_local_runs_what_is_missing_and_stops_at_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[Path] = []

    class Torchrun:
        def __init__(self, command: list[str], **_: Any):
            started.append(Path(command[command.index("--out") + 1]))

        def wait(self) -> None:
            if len(started) < 3:
                seed = int(started[-1].name[-1])
                make_run(tmp_path / started[-1], "language", "gpt2_pydoc_small", seed=seed, results={})

    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    monkeypatch.setattr(reproduce.subprocess, "Popen", Torchrun)
    done, *_ = TABLES["gap"].rows
    folder, _ = reproduce.stand_in(done, 4, seed=0)
    make_run(tmp_path / folder, "language", "gpt2_pydoc_small", results={})
    with pytest.raises(UserError, match=r"language-gpt2_pydoc_small-co2-tau6-seed0 is not finished"):
        reproduce.run_local(TABLES["gap"], workers=4, dry_run=False)
    assert [path.name[-5:] for path in started] == ["seed1", "seed2", "seed0"], "seed 0 without penalty was there"
