"""The Slurm scripts, with srun, scontrol and, in the fast tests, torchrun played by small scripts."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import reproduce
from language.finetune_recipes import FinetuneRecipe
from results.paper import GPUS
from tests.slurm_fakes import ROOT, SAY, SCRIPTS, directives, install, recipes_module, recipes_of, start, torchruns_line
from training.data import per_worker
from training.recipe import parse

# -- the scripts themselves ---------------------------------------------------------------------------------------


def test_each_task_has_a_script_for_each_cluster():
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "slurm").glob("*_*.sh")} == set(SCRIPTS)


@pytest.mark.parametrize("script", [*SCRIPTS, "slurm/env.sh", "slurm/launch.sh"])
def test_bash_can_parse_it(script: str):
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_asks_for_its_cluster_for_a_log_and_for_a_signal_before_the_end(script: str):
    asked, cluster = directives(script), Path(script).stem.split("_")[1]
    assert asked["--nodes"] == str(reproduce.NODES[cluster]) and asked["--gpus-per-node"] == str(GPUS)
    assert asked["--job-name"] == Path(script).stem and asked["--output"] == "slurm-%x-%j.out"
    assert asked["--signal"] == "B:USR1@600" and asked["--open-mode"] == "append" and "--requeue" in asked
    assert asked["--ntasks-per-node"] == "1" and int(asked["--cpus-per-task"]) >= GPUS


@pytest.mark.parametrize("script", [*SCRIPTS, "slurm/README.md"])
def test_a_trial_of_another_length_has_a_folder_of_its_own(script: str):
    trials = [line for line in (ROOT / script).read_text().splitlines() if "sbatch" in line and "--epochs" in line]
    assert all("OUT=" in line for line in trials) and (trials or not script.startswith("slurm/vision_"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_slurm_accepts_it(script: str):
    if not shutil.which("sbatch"):
        pytest.skip("Slurm is not installed: no sbatch")
    if subprocess.run(["scontrol", "ping"], capture_output=True, timeout=60).returncode:
        pytest.skip("Slurm is installed, but no controller answers")
    result = subprocess.run(["sbatch", "--test-only", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if "node configuration is not available" in result.stderr:
        pytest.skip(f"this cluster is smaller: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr


# -- what they start ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_its_command_line_trains_its_recipe_on_all_gpus(script: str, tmp_path: Path):
    torchrun, module, (name, *overrides) = torchruns_line(script, tmp_path, RDZV_PORT="")
    assert torchrun == [
        "--log-dir=" + str(Path(overrides[overrides.index("--out") + 1], "logs", "node0")),
        "--nnodes=1",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-id=17",
        "--rdzv-endpoint=127.0.0.1:20017",
        "--tee=3",
    ]
    recipes = recipes_of(script)
    own = type(recipes[name]).__module__  # language.recipe has the class of language.recipes
    assert own.removesuffix("s") == recipes_module(module).removesuffix("s")
    recipe = parse(recipes, [name, *overrides])
    tunes = isinstance(recipe, FinetuneRecipe)
    method, of = ("zo", "model-") if tunes else ("co2", "")
    assert recipe.resume and recipe.method == method and recipe.seed == 0
    assert not tunes or (recipe.model, recipe.data) == (ROOT / "data" / "model", ROOT / "data" / "prompts")
    assert recipe.co2.tau == recipes[name].co2.tau, "the script's tau is the recipe's"
    cluster = Path(script).stem.split("_")[1]
    assert str(recipe.out) == f"runs/{cluster}/{of}{name}-{method}-tau{recipe.co2.tau}-1nodes-seed0"


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_recipe_that_it_names_gets_a_batch_that_its_gpus_divide(script: str, tmp_path: Path):
    (choices,) = re.findall(r"^RECIPE=.*$", (ROOT / script).read_text(), re.MULTILINE)
    recipes, cluster = recipes_of(script), Path(script).stem.split("_")[1]
    gpus = reproduce.NODES[cluster] * GPUS
    names = set(re.findall(r"\w+", choices)) & recipes.keys()
    assert len(names) >= 3
    for name in names:
        _, _, arguments = torchruns_line(script, tmp_path, RECIPE=name)
        batch_size = parse(recipes, arguments).batch_size
        per_worker(batch_size, gpus)
        assert batch_size == reproduce.fitting_batch(recipes[name], gpus), "the nearest to the recipe's"


@pytest.mark.parametrize(
    ("script", "gb", "zero", "offload"),
    [("gpt2_a100", 80, 2, False), ("gpt2_a100", 40, 3, False), ("gpt2_3090", 24, 3, True)],
)
def test_transnormer_is_given_what_makes_it_fit(script: str, gb: int, zero: int, offload: bool, tmp_path: Path):
    script = f"slurm/{script}.sh"
    _, _, arguments = torchruns_line(script, tmp_path, RECIPE="transnormer_7b_owt", GPU_GB=str(gb))
    recipe = parse(recipes_of(script), arguments)
    assert (recipe.zero, recipe.offload, recipe.accumulate) == (zero, offload, 8)


@pytest.mark.parametrize(("nodes", "batch_size"), [(10, 480), (8, 512)])
def test_gpt2_large_takes_two_samples_at_a_time_on_24_gb(nodes: int, batch_size: int, tmp_path: Path):
    """That is what tests/training/test_memory.py finds to fit."""
    script = "slurm/gpt2_3090.sh"
    large = {"RECIPE": "gpt2_large_owt", "BATCH_SIZE": str(batch_size)}
    recipe = parse(recipes_of(script), torchruns_line(script, tmp_path, **large)[2])
    assert -(-batch_size // (nodes * GPUS) // recipe.accumulate) == 2
    assert recipe.accumulate >= recipes_of(script)["gpt2_large_owt"].accumulate
    _, _, arguments = torchruns_line(script, tmp_path, **large, ACCUMULATE="8")
    assert parse(recipes_of(script), arguments).accumulate == 8


@pytest.mark.parametrize(
    ("script", "recipe", "said"),
    [
        ("gpt2_a100", "gpt2_small_owt", "batch 512 over all GPUs, not the recipe's, which does not divide"),
        ("gpt2_3090", "gpt2_small_wikitext103", "batch 240 over all GPUs, not the recipe's"),
        ("gpt2_3090", "gpt2_medium_zo_owt", "batch 480 over all GPUs, not the recipe's"),
        ("finetune_a100", "prompts", "batch 128 over all GPUs, not the recipe's"),
        ("gpt2_3090", "gpt2_small_owt", ""),
        ("gpt2_a100", "gpt2_medium_zo_owt", ""),
        ("vision_a100", "imagenet_resnet50", ""),
    ],
)
def test_another_batch_than_the_recipes_is_told_in_one_line(script: str, recipe: str, said: str, tmp_path: Path):
    env = install(tmp_path, torchrun=SAY) | {"RECIPE": recipe}

    def told(**more: str) -> list[str]:
        process = start(f"slurm/{script}.sh", env | more)
        return [line for line in process.communicate(timeout=60)[0].splitlines() if line.startswith("batch ")]

    assert [said in line for line in told()] == ([True] if said else [])
    assert not told(BATCH_SIZE="640"), "asked for"


def test_variables_and_options_change_the_run(tmp_path: Path):
    changes = {"RECIPE": "digits_small", "METHOD": "slowmo", "TAU": "24", "BATCH_SIZE": "128", "SEED": "3", "OUT": "x"}
    _, _, arguments = torchruns_line("slurm/vision_a100.sh", tmp_path, "--epochs", "2", **changes)
    recipe = parse(recipes_of("slurm/vision_a100.sh"), arguments)
    assert (recipe.method, recipe.co2.tau, recipe.batch_size, recipe.seed) == ("slowmo", 24, 128, 3)
    assert (recipe.name, str(recipe.out), recipe.epochs) == ("digits_small", "x", 2)


def test_the_sites_settings_reach_the_workers(tmp_path: Path):
    say = 'echo "$CO2_DATA $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $OMP_NUM_THREADS" > "$FAKES/arguments"'
    env = install(tmp_path, torchrun=say) | {"IFACE": "bond0", "GLOO_SOCKET_IFNAME": "eth1"}
    env["SLURM_CPUS_PER_TASK"] = "32"
    env.pop("OMP_NUM_THREADS", None)
    given = {"CO2_DATA": "/sets", "OMP_NUM_THREADS": "3"}
    for more, said in (({}, f"{ROOT}/data bond0 eth1 16\n"), (given, "/sets bond0 eth1 3\n")):
        how = {"env": env | more, "capture_output": True, "timeout": 60}
        subprocess.run(["bash", "slurm/vision_a100.sh"], cwd=ROOT, check=True, **how)
        assert (tmp_path / "arguments").read_text() == said


def test_cores_loaders_and_the_sites_arguments_reach_srun_and_torchrun(tmp_path: Path):
    hooks = {"SRUN_ARGS": "--container-image=co2.sqsh --container-mounts=/a:/a", "TORCHRUN_ARGS": "--numa-binding=node"}
    torchrun, _, arguments = torchruns_line("slurm/vision_3090.sh", tmp_path, SLURM_CPUS_PER_TASK="32", **hooks)
    srun = (tmp_path / "srun_line").read_text().split()
    assert {"--cpus-per-task=32", "--cpu-bind=cores", *hooks["SRUN_ARGS"].split()} <= set(srun)
    assert "--numa-binding=node" in torchrun
    recipes = recipes_of("slurm/vision_3090.sh")
    assert parse(recipes, arguments).loader_workers == 15, "the GPU's share of 32 / 2 cores but one"
    _, _, arguments = torchruns_line("slurm/vision_3090.sh", tmp_path, LOADER_WORKERS="4")
    assert parse(recipes, arguments).loader_workers == 4
    assert "--loader_workers" not in torchruns_line("slurm/gpt2_3090.sh", tmp_path)[2], "it has none"


def test_the_number_in_an_array_is_the_seed_or_the_line_of_a_file(tmp_path: Path):
    _, _, arguments = torchruns_line("slurm/vision_a100.sh", tmp_path, SLURM_ARRAY_TASK_ID="2")
    assert parse(recipes_of("slurm/vision_a100.sh"), arguments).seed == 2
    jobs = tmp_path / "jobs.sh"
    line = "export RECIPE=digits_small METHOD={} TAU=12 BATCH_SIZE=128 SEED={} OUT='runs/a b'; JOB_ARGS=(--epochs 3)\n"
    jobs.write_text(line.format("co2", 0) + line.format("slowmo", 5))
    array = {"JOBS": str(jobs), "SLURM_ARRAY_TASK_ID": "1"}
    _, _, arguments = torchruns_line("slurm/vision_a100.sh", tmp_path, "--optim.lr", "0.5", **array)
    recipe = parse(recipes_of("slurm/vision_a100.sh"), arguments)
    assert (recipe.name, recipe.method, recipe.co2.tau, recipe.batch_size) == ("digits_small", "slowmo", 12, 128)
    assert (recipe.seed, str(recipe.out), recipe.epochs, recipe.optim.lr) == (5, "runs/a b", 3, 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"JOBS": "/dev/null", "SLURM_ARRAY_TASK_ID": "7"}, "/dev/null has no line for job 7 of the array"),
        ({"JOBS": "/dev/null"}, "JOBS is set, but this is no job array"),
        ({"SLURM_JOB_NUM_NODES": ""}, "submit this script with sbatch"),
        ({"SLURM_GPUS_ON_NODE": ""}, "the job has no GPUs"),
        ({"VENV": "/nowhere"}, "/nowhere/bin/activate"),
    ],
)
def test_a_script_that_cannot_run_says_why(change: dict[str, str], message: str, tmp_path: Path):
    env = install(tmp_path, torchrun=SAY) | change
    how = {"capture_output": True, "text": True, "timeout": 60}
    result = subprocess.run(["bash", "slurm/vision_a100.sh"], cwd=ROOT, env=env, **how)
    assert result.returncode != 0 and message in result.stderr and not (tmp_path / "arguments").exists()
