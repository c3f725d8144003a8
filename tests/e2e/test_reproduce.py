"""reproduce.py: the rows that it runs, and the tables that it makes from run folders, checked by hand."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import reproduce
from core import UserError
from core.methods import METHODS
from results.paper import TABLES, TAUS
from tests.e2e.test_collect import make_run
from tests.scripts import Mistakes
from training.recipe import flat, parse

ROOT = Path(__file__).resolve().parents[2]
THROUGHPUT = ["throughput", "throughput_roce"]
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


# -- the rows -----------------------------------------------------------------------------------------------------


def test_the_papers_values_are_those_known_and_no_others():
    given = {(name, row.label, row.method, row.tau): row.paper for name, row in ROWS if row.paper}
    assert given == PAPER
    assert TABLES["throughput"].paper_ratio == {("ddp", None): 0.82, ("co2", 48): 1.06, ("co2", 12): 0.86}
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


def test_every_recipe_of_the_papers_tasks_is_in_a_row_and_every_row_has_a_stand_in_or_its_table_a_reason():
    """All but the stand-ins, ShapeNet-55, which is Point-MAE's own set, and what trains without gradients."""
    stand_ins = ("small", "digits", "cifar10", "shapenet55_mae", "gpt2_medium_zo")
    for task in ("vision", "segmentation", "pointcloud", "language"):
        recipes = importlib.import_module(f"{task}.recipes")
        names = {name for name in recipes.RECIPES if not name.endswith("_small") and not name.startswith(stand_ins)}
        assert names - {row.local for _, row in ROWS} == {row.recipe for _, row in ROWS if row.task == task}
    for name, table in TABLES.items():
        without = [row for row in table.rows if not row.local]
        assert not without or "stand-in" in table.note, f"{name}: {without[0].label}"


def test_a_jobs_line_holds_all_that_its_row_says():
    small, _ = TABLES["gap"].rows
    variables, command = reproduce.submission(small, "a100", seed=2)
    name = "gpt2_small_owt-co2-tau48-8nodes-gap_none-seed2"
    assert command[:4] == ["sbatch", "--nodes=8", f"--job-name={name}", "--dependency=singleton"]
    assert command[4:] == ["slurm/gpt2_a100.sh", "--co2.gap", "none", "--co2.allow_unstable"]
    assert variables == {
        "RECIPE": "gpt2_small_owt",
        "METHOD": "co2",
        "TAU": "48",
        "BATCH_SIZE": "512",  # 480 does not divide by 64
        "SEED": "2",
        "OUT": f"runs/a100/{name}",
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


@pytest.mark.parametrize("name", [name for name in TABLES if name not in THROUGHPUT])
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
            outer = [name for name in before if name.startswith(("co2.", "delayed.", "ddp_wire."))]
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


def test_rows_methods_and_seeds_are_chosen_and_options_passed_on(told: Told):
    chosen = ["--dry-run", "--rows", "resnet50,imagenet_vit_base", "--methods", "co2,ddp", "--seeds", "0,7"]
    lines = told("imagenet", *chosen, "--", "--optim.lr", "0.5", "--co2.tau=24")
    words = [[part.split("=") for part in line.split()[:6]] for line in lines]
    got = [tuple(value for key, value in of if key in ("RECIPE", "METHOD", "SEED")) for of in words]
    recipes = ("imagenet_resnet50", "imagenet_vit_base")
    assert got == [(recipe, method, seed) for recipe in recipes for method in ("ddp", "co2") for seed in "07"]
    assert all(line.endswith("slurm/vision_a100.sh --optim.lr 0.5") and " TAU=24 " in line for line in lines)
    assert "OUT=runs/a100/imagenet_resnet50-co2-tau24-16nodes-lr_0.5-seed7 " in lines[3], "a folder of its own"
    few = ["--dry-run", "--local", "--rows"]
    (line,) = told("gpt2", *few, "gpt2-small", "--methods", "local", "--seeds", "7")
    assert " --epochs 1 --epoch_steps 100 " in line and "--out runs/local/language-gpt2_pydoc_small-local-tau6-" in line
    (line,) = told("tau_language", *few, "tau12", "--seeds", "0", "--", "--epochs", "2")
    assert " --method co2 --co2.tau 12 --epochs 2 " in line and "-co2-tau12-epochs_2-" in line


def test_every_tau_that_the_paper_searched_and_both_networks_have_rows():
    assert TAUS == (1, 3, 6, 12, 24, 48, 96, 192)
    for name in ("tau_vision", "tau_language"):
        assert tuple(row.tau for row in TABLES[name].rows) == TAUS
    asked = {(row.network, row.method, row.tau, row.nodes) for name in THROUGHPUT for row in TABLES[name].rows}
    methods = (("ddp", None), ("co2", 48), ("co2", 12), ("slowmo", 48), ("overlap_local", 48))
    assert asked == {(net, *method, nodes) for net in ("tcp", "roce") for method in methods for nodes in (1, 2, 16)}
    assert TABLES["throughput"].env == {"NCCL_IB_DISABLE": "1"} and not TABLES["throughput_roce"].env


def test_rows_with_more_nodes_than_the_cluster_are_left_out(told: Told):
    lines = told("throughput", "--dry-run", "--cluster", "3090")
    assert sum(line == "# left out: 128 GPUs, for the 3090 cluster has 10 nodes" for line in lines) == 5
    assert not any("--nodes=16" in line for line in lines) and len(lines) == 15


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
    assert "| imagenet | ResNet-50 | co2 |  | 1 | 1 | 1 | 42.0 | 48.0 |" in lines  # 30 - 12, and another 30
    assert "| imagenet | ResNet-50 | ddp |  | 0 | 0 | 3 | 0.0 | ? |" in lines
    assert lines[-1].startswith("42.0 GPU hours used; left: 48.0, and what the rows marked ? need")
    lines = told("imagenet", "--dry-run", "--rows", "resnet50", "--methods", "co2")
    assert lines[0] == f"# finished: {done.relative_to(tmp_path)}"
    assert [line.split("SEED=")[1][0] for line in lines[1:]] == ["1", "2"], "what was begun goes on"


def test_again_repeats_a_finished_run_and_keeps_its_folder(told: Told, sbatch: Any, tmp_path, monkeypatch):
    sbatch("")
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    done = finish(tmp_path, "co2", 48, 30.0)
    began = finish(tmp_path, "co2", 48, 12.0, seed=1, done=False)
    asked = ("imagenet", "--rows", "resnet50", "--methods", "co2", "--again")
    assert [line.split("SEED=")[1][0] for line in told(*asked, "--dry-run")] == ["0", "1", "2"] and done.is_dir()
    assert len(told(*asked)) == 3 and not done.exists() and began.is_dir()
    (earlier,) = done.parent.glob(f"{done.name}-before-*")
    assert (earlier / "summary.json").is_file()


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
        (["xyz"], "table 'xyz' does not exist; `python reproduce.py list` names them"),
        (["imagenet", "--rows", "resnet5"], "--rows resnet5: not in imagenet, which has ResNet-50, ViT-Base, Swin-T,"),
        (["imagenet", "--methods", "co3"], "--methods co3: not in imagenet, which has co2, ddp,"),
        (["imagenet", "--methods", "delayed"], "imagenet has no row with --rows '' and --methods 'delayed'"),
        (["imagenet", "--seeds", "a"], "--seeds a: give numbers up to 1000000000, such as 0,1"),
        (["imagenet", "--", "--seed", "3"], "--seed behind --: reproduce.py chooses it itself, see --seeds"),
        (["imagenet", "--", "epochs", "3"], "'epochs' behind --: give options of the train script"),
        (
            ["imagenet", "--", "--epochss", "3"],
            f"behind --: vision.train, {ROW}: Unrecognized options: --epochss, 3 Per",
        ),
        (["imagenet", "--", "--epochss", "3"], "Perhaps you meant: --epochs INT"),
        (["imagenet", "--local", "--", "--batch_size=x"], "method ddp: Error parsing --batch_size: invalid literal"),
        (["imagenet", "--dry-run", "--", "--epochs", "0"], "method ddp: Error parsing VisionRecipe: epochs=0:"),
        (
            ["imagenet", "--methods", "ddp", "--", "--co2.outer_lr", "0.5"],
            f"{ROW}: co2.outer_lr=0.5 is method co2's own",
        ),
        (["--collect", "nowhere"], "--collect nowhere: no such folder; name"),
        (["--collect", str(ROOT / "slurm")], "no run folder in it, at any depth"),
        (["gap"], "no sbatch here: --dry-run prints the lines"),
        (["throughput", "--local"], "throughput has no stand-ins: it needs a cluster"),
    ],
)
def test_a_mistake_is_one_clear_line(told: Told, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError) as error:
        told(*arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_bad_folder_ends_with_status_2_and_no_traceback(mistake: Mistakes):
    said = mistake("reproduce", "--collect", "nowhere")
    assert said.startswith("error: --collect nowhere: ") and said.count("\n") == 1


def test_jobs_are_submitted_with_their_environment(told: Told, sbatch: Any, tmp_path: Path):
    sbatch(f'echo "$TAU $NCCL_IB_DISABLE $*" >> {tmp_path}/jobs\n[ "$TAU $SEED" = "48 0" ]')
    with pytest.raises(UserError, match="sbatch refused this job"):  # the first with tau 12
        told("throughput")
    jobs = (tmp_path / "jobs").read_text().splitlines()
    assert jobs[0].startswith("48 1 --nodes=1 --job-name=") and jobs[0].endswith(" slurm/gpt2_a100.sh --epochs 1")
    assert [job.split()[0] for job in jobs] == ["48"] * 6 + ["12"]


def test_a_reader_that_has_seen_enough_ends_it_without_a_traceback():
    text = "from training.script import launch; launch(lambda: [print('x' * 100) for _ in range(20000)])"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 0 and process.stderr.read() == ""


def test_another_batch_than_the_recipes_is_told_in_one_line():
    by_method = {row.method: row for row in TABLES["gpt2"].rows if row.recipe == "gpt2_small_owt"}
    said = "# GPT-2 Small, co2: batch 512, for the recipe's 480 does not divide by 64 GPUs"
    assert reproduce.batch_note(by_method["co2"], "a100", {}) == said
    assert reproduce.batch_note(by_method["co2"], "a100", {"batch_size": "640"}) == ""
    row = next(row for row in TABLES["imagenet"].rows if row.recipe == "imagenet_resnet50")
    assert reproduce.batch_note(row, "a100", {}) == "" and "batch 8160" in reproduce.batch_note(row, "3090", {})
    assert reproduce.batch_note(TABLES["throughput"].rows[0], "a100", {}) == "", "the row's own"
