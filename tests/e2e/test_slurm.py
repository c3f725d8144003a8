"""The Slurm scripts, with srun, scontrol and, in the fast tests, torchrun played by small scripts."""

import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import reproduce
from bench.cluster import hold_port
from language.finetune_recipes import FinetuneRecipe
from results.paper import GPUS
from training.recipe import Recipe, parse
from training.sampling import per_worker

ROOT = Path(__file__).resolve().parents[2]
TASKS = ("vision", "segmentation", "pointcloud", "gpt2", "roberta", "finetune")
SCRIPTS = [f"slurm/{task}_{cluster}.sh" for task in TASKS for cluster in reproduce.NODES]
SMALL = {
    "vision": "digits_small",
    "segmentation": "digits_small",
    "pointcloud": "surfaces_small",
    "gpt2": "gpt2_pydoc_small",
    "roberta": "roberta_pydoc_small",
    "finetune": "prompts",
}

FAKES = {
    # one node: runs what stands behind its own options
    "srun": 'echo "$@" > "$FAKES/srun_line"; while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "squeue": 'date -d "@$(cat "$FAKES/end")" +%Y-%m-%dT%H:%M:%S',
    "scontrol": """case "$1" in
show) [ "$2" = job ] && cat "$FAKES/job" || echo 127.0.0.1 ;;
requeue)
    [ ! -e "$FAKES/refuse" ] && { cat "$FAKES/requeued" 2>/dev/null; echo "$2"; } > "$FAKES/new" &&
        mv "$FAKES/new" "$FAKES/requeued" ;;
esac""",
    # a worker: handles the signals although torchrun ignores them, which a bash script could not
    "worker": """exec python3 -c '
import os, pathlib, signal, sys, time
fakes = pathlib.Path(os.environ["FAKES"])
def save(*_):
    (fakes / "summary.json").write_text(os.environ.get("SUMMARY", "stopped_by_signal"))
    sys.exit(0)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, save)
(fakes / "ready").touch()
time.sleep(60)
sys.exit(9)
'""",
}
SAY = 'printf "%s\\n" "$@" > "$FAKES/arguments"'
WORK = "worker & wait $!"
HELD: list[socket.socket] = []  # the ports of the scripts that a test starts


def install(folder: Path, **programs: str) -> dict[str, str]:
    """Writes programs into `folder`; returns an environment with them and Slurm's variables of one node of 2 GPUs."""
    for name, text in {**FAKES, **programs}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    HELD.append(hold_port())
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "CO2_"))}
    return kept | {
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "FAKES": str(folder),
        "VENV": "",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node0",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURMD_NODENAME": "node0",
        "RDZV_PORT": str(HELD[-1].getsockname()[1]),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def torchruns_line(script: str, folder: Path, *options: str, **variables: str) -> tuple[list[str], str, list[str]]:
    """(torchrun's options, module, the train script's arguments) that a Slurm script ends up with."""
    env = install(folder, torchrun=SAY) | variables
    subprocess.run(["bash", script, *options], cwd=ROOT, env=env, check=True, capture_output=True, timeout=60)
    arguments = (folder / "arguments").read_text().splitlines()
    at = arguments.index("-m")
    return arguments[:at], arguments[at + 1], arguments[at + 2 :]


def directives(script: str) -> dict[str, str]:
    """{"--nodes": "16", "--requeue": ""} and so on, of a script's #SBATCH lines."""
    return dict(re.findall(r"^#SBATCH (--[a-z-]+)=?(\S*)$", (ROOT / script).read_text(), re.MULTILINE))


def recipes_of(script: str) -> dict[str, Recipe]:
    module = re.search(r"^launch (\w+\.\w+)", (ROOT / script).read_text(), re.MULTILINE)
    assert module
    return importlib.import_module(recipes_module(module[1])).RECIPES


def recipes_module(module: str) -> str:
    """Where the recipes of a train script are."""
    return module.replace(".train", ".recipes").replace(".finetune", ".finetune_recipes")


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)


def start(script: str, env: dict[str, str], *options: str) -> subprocess.Popen[str]:
    command = ["bash", script, *options]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


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
    assert type(recipes[name]).__module__ == recipes_module(module)
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
        ("gpt2_3090", "gpt2_small_owt", ""),
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
    env = install(tmp_path, torchrun=say) | {
        "IFACE": "bond0",
        "GLOO_SOCKET_IFNAME": "eth1",
        "SLURM_CPUS_PER_TASK": "32",
    }
    env.pop("OMP_NUM_THREADS", None)
    subprocess.run(["bash", "slurm/vision_a100.sh"], cwd=ROOT, env=env, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "arguments").read_text() == f"{ROOT}/data bond0 eth1 16\n"
    env |= {"CO2_DATA": "/sets", "OMP_NUM_THREADS": "3"}
    subprocess.run(["bash", "slurm/vision_a100.sh"], cwd=ROOT, env=env, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "arguments").read_text() == "/sets bond0 eth1 3\n"


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
    result = subprocess.run(
        ["bash", "slurm/vision_a100.sh"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )
    assert result.returncode != 0 and message in result.stderr and not (tmp_path / "arguments").exists()


# -- signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [False, True])
def test_the_signal_reaches_the_workers_and_the_job_is_requeued(refused: bool, tmp_path: Path):
    env = install(tmp_path, torchrun=WORK) | {"OUT": str(tmp_path)}
    if refused:
        (tmp_path / "refuse").touch()
    job = start("slurm/vision_a100.sh", env)
    wait_for(tmp_path / "ready", job)
    job.send_signal(signal.SIGUSR1)  # to the batch script alone, as --signal=B: does
    text, _ = job.communicate(timeout=60)
    assert "job 17 was told to stop, and its run has saved: back into the queue" in text
    if refused:
        assert job.returncode == 1 and "not requeued; submit it again" in text
    else:
        assert job.returncode == 0 and (tmp_path / "requeued").read_text() == "17\n", text


def test_a_run_that_has_ended_is_not_requeued(tmp_path: Path):
    """The signal came in its last minutes."""
    env = install(tmp_path, torchrun=WORK) | {"OUT": str(tmp_path), "SUMMARY": '{"steps": 22}'}
    job = start("slurm/vision_a100.sh", env)
    wait_for(tmp_path / "ready", job)
    job.send_signal(signal.SIGUSR1)
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and not (tmp_path / "requeued").exists(), text


@pytest.mark.parametrize(("when", "requeued"), [("2026-01-02T03:04:05", True), ("None", False)])
def test_a_stopped_run_is_requeued_if_it_was_preempted_but_not_if_it_was_cancelled(
    when: str, requeued: bool, tmp_path: Path
):
    """Slurm has sent SIGTERM to all processes, torchrun's among them."""
    (tmp_path / "job").write_text(f"JobState=RUNNING PreemptTime={when}")
    job = start("slurm/vision_a100.sh", install(tmp_path, torchrun=WORK) | {"OUT": str(tmp_path)})
    wait_for(tmp_path / "ready", job)
    subprocess.run(["pkill", "-TERM", "-P", str(job.pid)], check=True)
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and (tmp_path / "requeued").exists() == requeued, text


def test_a_run_that_does_not_stop_in_time_is_requeued_before_the_limit(tmp_path: Path):
    """The workers ignore the signal, as in a round that is too long."""
    ignores = 'touch "$FAKES/ready"; until [ -e "$FAKES/enough" ]; do sleep 0.1; done'
    env = install(tmp_path, torchrun=ignores)
    job = start("slurm/vision_a100.sh", env)
    wait_for(tmp_path / "ready", job)
    (tmp_path / "end").write_text(str(int(time.time()) + 62))
    assert not (tmp_path / "requeued").exists()
    job.send_signal(signal.SIGUSR1)
    wait_for(tmp_path / "requeued", job)
    assert (tmp_path / "requeued").read_text() == "17\n"
    job.kill()  # as Slurm does then
    (tmp_path / "enough").touch()
    text, _ = job.communicate(timeout=60)
    assert "job 17 is still running a minute before its limit: back into the queue" in text


# of a test, whose naps take no time
CLOCK = """
date() { if [ "$1" = -d ]; then command date "$@"; else cat "$FAKES/now"; fi; }
nap() { echo $(($(cat "$FAKES/now") + $1)) > "$FAKES/now"; }
""".strip()


@pytest.mark.parametrize(("end", "told"), [(70, "stopped"), (None, "left alone")])
def test_a_run_whose_checkpoints_take_long_is_told_to_stop_earlier(end: int | None, told: str, tmp_path: Path):
    """A minute and three times as long as the slowest took before the limit; never in a job without one."""
    for step, seconds in enumerate((1.9, 0.7)):
        manifest = tmp_path / "checkpoints" / f"step{step:09d}" / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.write_text(json.dumps({"workers": 2, "seconds": seconds, "rests": []}, indent=1))
    began = int(time.time())
    (tmp_path / "now").write_text(str(began))
    if end:
        (tmp_path / "end").write_text(str(began + end))
    script = f"source slurm/launch.sh; {CLOCK}; trap 'echo stopped; exit' USR1; stop_in_time & wait; echo left alone"
    env = install(tmp_path) | {"OUT": str(tmp_path)}
    said = subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert said.stdout == f"{told}\n" and (not end or int((tmp_path / "now").read_text()) == began + end - 63)


def test_a_second_signal_does_not_reach_the_workers(tmp_path: Path):
    """It would end them without a checkpoint."""
    count = 'open(fakes / "signals", "a").write("x"); time.sleep(1.5)'
    worker = FAKES["worker"].replace("def save(*_):", f"def save(*_):\n    {count}")
    job = start("slurm/vision_a100.sh", install(tmp_path, torchrun=WORK, worker=worker) | {"OUT": str(tmp_path)})
    wait_for(tmp_path / "ready", job)
    for _ in range(2):
        job.send_signal(signal.SIGUSR1)
        wait_for(tmp_path / "signals", job)
    text, _ = job.communicate(timeout=60)
    assert (tmp_path / "signals").read_text() == "x" and (tmp_path / "requeued").read_text() == "17\n", text


def test_a_run_that_fails_is_not_requeued(tmp_path: Path):
    job = start("slurm/vision_a100.sh", install(tmp_path, torchrun="exit 3"))
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 3 and not (tmp_path / "requeued").exists(), text


def test_termination_reaches_the_workers(tmp_path: Path):
    """scancel and preemption: Slurm may signal on_node alone, or torchrun too, which a SIGTERM must not end."""
    env = install(tmp_path, torchrun=WORK)
    command = ["bash", "-c", "source slurm/launch.sh; on_node torchrun"]
    node = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(tmp_path / "ready", node)
    subprocess.run(["pkill", "-TERM", "-P", str(node.pid)], check=True)
    node.terminate()
    node.communicate(timeout=60)
    assert node.returncode == 0 and (tmp_path / "summary.json").exists()


# -- the real torchrun, on CPUs -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_its_torchrun_line_runs_with_the_small_recipe(script: str, tmp_path: Path):
    small = SMALL[Path(script).stem.split("_")[0]]
    if small == "prompts":
        from tests.tiny_models import make_model, make_prompts  # here, for transformers takes seconds to import

        make_model(tmp_path / "model")
        make_prompts(tmp_path / "prompts")
    env = install(tmp_path) | {
        "RECIPE": small,
        "BATCH_SIZE": "",
        "OUT": str(tmp_path / "run"),
        "CO2_DATA": str(tmp_path),
    }
    result = subprocess.run(
        ["bash", script, "--dry_run", "--device", "cpu"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f'"name": "{small}"' in result.stdout and "2 workers of" in result.stdout


@pytest.mark.slow
def test_a_run_is_stopped_requeued_and_resumed(tmp_path: Path):
    """As at the time limit: SIGUSR1 to the batch script, a checkpoint, the queue, and on from there to the end."""
    run, options = tmp_path / "run", ("--device", "cpu", "--log_every", "2", "--checkpoint_every", "0")
    env = install(tmp_path) | {"RECIPE": "digits_small", "TAU": "6", "BATCH_SIZE": "", "OUT": str(run)}
    job = start("slurm/vision_3090.sh", env, *options, "--epochs", "60")
    wait_for(run / "metrics.jsonl", job)
    while len((run / "metrics.jsonl").read_text().splitlines()) < 20:
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    text, _ = job.communicate(timeout=120)
    assert job.returncode == 0 and (tmp_path / "requeued").read_text() == "17\n", text
    stopped = json.loads((run / "summary.json").read_text())
    assert stopped["stopped_by_signal"] == signal.SIGUSR1 and 0 < stopped["steps"] < 60 * 22

    epochs = stopped["steps"] // 22 + 2
    job = start("slurm/vision_3090.sh", env, *options, "--epochs", str(epochs))
    text, _ = job.communicate(timeout=240)
    assert job.returncode == 0 and (tmp_path / "requeued").read_text() == "17\n", "not once more"
    finished = json.loads((run / "summary.json").read_text())
    assert finished["steps"] == 22 * epochs and "stopped_by_signal" not in finished
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "train_loss" in row]
    assert steps == sorted(set(steps)), "no step is trained twice"
