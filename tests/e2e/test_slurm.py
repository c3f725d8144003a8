"""The Slurm scripts, with srun, scontrol and, in the fast tests, torchrun played by small scripts."""

import functools
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import reproduce
from bench.cluster import hold_port
from language.finetune_recipes import FinetuneRecipe
from results.paper import GPUS
from tests.imports import ROOT
from tests.scripts import wait_until
from training import checks
from training.data.samples import per_worker
from training.recipe import Recipe, parse

TASKS = ("vision", "segmentation", "pointcloud", "gpt2", "roberta", "finetune")
SCRIPTS = [f"slurm/{task}_{cluster}.sh" for task in TASKS for cluster in reproduce.NODES]

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
        new = folder / f"{name}.new"  # put in place whole: a script before may still be starting the old one
        new.write_text(f"#!/bin/bash\n{text}\n")
        new.chmod(0o755)
        new.replace(folder / name)
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
    return importlib.import_module(recipes_module(table_row(script)[0])).RECIPES


def table_row(script: str) -> tuple[str, list[str]]:
    """(train script, recipes) that slurm/task.sh has for the script's task."""
    row = rf"^    {Path(script).stem.split('_')[0]}\).*\n +module=(.*)\n +recipes=\"(.*)\""
    ((module, recipes),) = re.findall(row, (ROOT / "slurm/task.sh").read_text(), re.MULTILINE)
    return module, recipes.split()


def recipes_module(module: str) -> str:
    """Where the recipes of a train script are."""
    return module.replace(".train", ".recipes").replace(".finetune", ".finetune_recipes")


def start(script: str, env: dict[str, str], *options: str) -> subprocess.Popen[str]:
    command = ["bash", script, *options]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_asks_for_its_cluster_for_a_log_and_for_a_signal_before_the_end(script: str):
    asked, cluster = directives(script), Path(script).stem.split("_")[1]
    assert asked["--nodes"] == str(reproduce.NODES[cluster]) and asked["--gpus-per-node"] == str(GPUS)
    assert asked["--job-name"] == Path(script).stem and asked["--output"] == "slurm-%x-%j.out"
    assert asked["--signal"] == "B:USR1@600" and asked["--open-mode"] == "append" and "--requeue" in asked
    assert asked["--ntasks-per-node"] == "1" and int(asked["--cpus-per-task"]) >= GPUS


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
    get_args_parser().parse_args([*torchrun, "-m", module])  # else torchrun itself would refuse them
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


SLOW = (pytest.param(script, marks=pytest.mark.slow) for script in SCRIPTS if "3090" in script)


@pytest.mark.parametrize("script", [*(script for script in SCRIPTS if "a100" in script), *SLOW])
def test_each_recipe_that_it_names_gets_a_batch_that_its_gpus_divide(script: str, tmp_path: Path):
    recipes, cluster = recipes_of(script), Path(script).stem.split("_")[1]
    gpus = reproduce.NODES[cluster] * GPUS
    _, names = table_row(script)
    assert len(names) >= 4 and set(names) <= recipes.keys()
    for name in names:
        _, _, arguments = torchruns_line(script, tmp_path, RECIPE=name)
        batch_size = parse(recipes, arguments).batch_size
        per_worker(batch_size, gpus)
        assert batch_size == reproduce.fitting_batch(recipes[name], gpus), "the nearest to the recipe's"


def test_nodes_are_workers_when_asked_for(tmp_path: Path):
    _, _, arguments = torchruns_line("slurm/gpt2_a100.sh", tmp_path, "--recommended", PER_NODE="8")
    recipe = parse(recipes_of("slurm/gpt2_a100.sh"), arguments)
    assert recipe.per_node == 8 and recipe.co2.merge == "keep_local" and "-per8-" in str(recipe.out)
    _, _, arguments = torchruns_line("slurm/gpt2_3090.sh", tmp_path, RECIPE="gpt2_xl_owt")
    assert parse(recipes_of("slurm/gpt2_3090.sh"), arguments).per_node == 0


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
        ({"VENV": "/nowhere"}, "no /nowhere/bin/activate: run make setup, or set VENV, CONDA_ENV or CONTAINER"),
    ],
)
def test_a_script_that_cannot_run_says_why(change: dict[str, str], message: str, tmp_path: Path):
    env = install(tmp_path, torchrun=SAY) | change
    how = {"capture_output": True, "text": True, "timeout": 60}
    result = subprocess.run(["bash", "slurm/vision_a100.sh"], cwd=ROOT, env=env, **how)
    assert result.returncode != 0 and message in result.stderr and not (tmp_path / "arguments").exists()


# -- signals ------------------------------------------------------------------------------------------------------


def begun(folder: Path, **env: str) -> subprocess.Popen[str]:
    """A job whose workers run."""
    programs = {"torchrun": WORK} | {name: env.pop(name) for name in ("torchrun", "worker") if name in env}
    job = start("slurm/vision_a100.sh", install(folder, **programs) | {"OUT": str(folder)} | env)
    wait_until((folder / "ready").exists, job, 120)
    return job


@pytest.mark.parametrize("case", ["requeued", "refused", "ended"])
def test_the_signal_reaches_the_workers_and_the_job_is_requeued_unless_its_run_has_ended(case: str, tmp_path: Path):
    """As where the signal came in its last minutes."""
    if case == "refused":
        (tmp_path / "refuse").touch()
    job = begun(tmp_path, **{"SUMMARY": '{"steps": 22}'} if case == "ended" else {})
    job.send_signal(signal.SIGUSR1)  # to the batch script alone, as --signal=B: does
    text, _ = job.communicate(timeout=60)
    saved = "job 17 was told to stop, and its run has saved: back into the queue"
    assert (saved in text) is (case != "ended") and job.returncode == (case == "refused"), text
    assert (tmp_path / "requeued").exists() is (case == "requeued")
    if case == "requeued":
        assert (tmp_path / "requeued").read_text() == "17\n"
    assert ("not requeued; submit it again" in text) is (case == "refused")


def test_a_run_that_does_not_stop_in_time_is_requeued_before_the_limit(tmp_path: Path):
    """The workers ignore the signal, as in a round that is too long."""
    job = begun(tmp_path, torchrun='touch "$FAKES/ready"; until [ -e "$FAKES/enough" ]; do sleep 0.1; done')
    (tmp_path / "end").write_text(str(int(time.time()) + 62))
    assert not (tmp_path / "requeued").exists()
    job.send_signal(signal.SIGUSR1)
    wait_until((tmp_path / "requeued").exists, job, 120)
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
        manifest.write_text(json.dumps({"seconds": seconds, "files": {}}, indent=1))
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
    job = begun(tmp_path, worker=worker)
    for _ in range(2):
        job.send_signal(signal.SIGUSR1)
        wait_until((tmp_path / "signals").exists, job, 120)
    text, _ = job.communicate(timeout=60)
    assert (tmp_path / "signals").read_text() == "x" and (tmp_path / "requeued").read_text() == "17\n", text


def test_a_run_that_fails_is_not_requeued(tmp_path: Path):
    job = start("slurm/vision_a100.sh", install(tmp_path, torchrun="exit 3"))
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 3 and not (tmp_path / "requeued").exists(), text


def told_costs(task: str, name: str, folder: Path, monkeypatch, capsys) -> str:
    """The cells of a recipe in slurm/README.md, by the dry runs of its two scripts."""
    cells = [f"`{task}`", f"`{name}`"]
    for cluster, gpu in (("a100", "A100"), ("3090", "RTX 3090")):
        script = f"slurm/{task}_{cluster}.sh"
        gpus = reproduce.NODES[cluster] * GPUS
        large = {"GPU_GB": "80"} if "transnormer" in name and gpu == "A100" else {}
        monkeypatch.setenv("WORLD_SIZE", str(gpus))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(GPUS))
        train = importlib.import_module(table_row(script)[0])
        recipe = parse(train.RECIPES, torchruns_line(script, folder, RECIPE=name, **large)[2])
        make = functools.partial(train.make_model, pad=1) if "language" in train.__name__ else train.make_model
        checks.dry_run(recipe, make)
        text = capsys.readouterr().out
        for pattern in (r"([\d.]+) GiB a GPU\b", r"\n([\d.]+) GB a checkpoint"):
            cells.append(re.findall(pattern, text)[0])
    return f"| {' | '.join(cells)} |"


@pytest.mark.slow
@pytest.mark.parametrize("task", [task for task in TASKS if task != "finetune"])
def test_the_readme_has_what_each_recipe_costs(task: str, tmp_path: Path, monkeypatch, capsys):
    """Fine-tuning has the user's model."""
    names = table_row(f"slurm/{task}_a100.sh")[1]
    rows = [told_costs(task, name, tmp_path, monkeypatch, capsys) for name in names]
    page = (ROOT / "slurm/README.md").read_text()
    assert not [row for row in rows if row not in page], "\n".join(rows)


# -- workers in a container, which a script plays: it begins in /, in its own environment -----------------------------


# what is behind a container's own options starts in /, with what the image has, and nothing of the job's environment
INSIDE = 'cd / && exec env -i PATH="{image}" OMP_NUM_THREADS=of_the_image NCCL_DEBUG=of_the_image "$@"'
TOOLS = ("bash", "env", "pkill", "pwd", "grep", "sed")
TORCHRUN = '{ pwd; env; } > "$FAKES/began"; printf "%s\\n" "$@" > "$FAKES/arguments"'


def say(name: str) -> str:
    return f'printf "%s\\n" "$@" > "$FAKES/{name}_line"; '


def in_container(folder: Path, *, kind: str = "pyxis", tools: tuple[str, ...] = TOOLS, **variables: str) -> dict:
    """The environment of a job whose node's container has these tools and a torchrun. kind: pyxis or apptainer."""
    image = folder / "image"
    image.mkdir()
    for tool in tools:
        (image / tool).symlink_to(f"/usr/bin/{tool}")
    (image / "torchrun").write_text(f"#!/bin/bash\nFAKES={folder}\n{TORCHRUN}\n")
    (image / "torchrun").chmod(0o755)
    inside = INSIDE.format(image=image)
    drop = 'while [[ "$1" == --* ]]; do shift; done; '
    srun = say("srun") + drop + (inside if kind == "pyxis" else 'exec "$@"')
    apptainer = say("apptainer") + 'while [[ "$1" != *.sif ]]; do shift; done; shift; ' + inside
    env = install(folder, torchrun="exit 9", srun=srun, apptainer=apptainer)
    kept = {key: value for key, value in env.items() if not key.startswith(("NCCL_", "OMP_", "CONTAINER"))}
    (folder / "co2.sif").touch()
    (folder / "co2.sqsh").touch()
    return kept | {"VENV": "/nowhere", "HOME": str(folder / "home"), "OUT": str(folder / "runs" / "a")} | variables


def submit(env: dict[str, str], script: str = "slurm/vision_a100.sh") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def began(folder: Path) -> tuple[str, dict[str, str]]:
    """The working directory and the environment of torchrun."""
    where, *lines = (folder / "began").read_text().splitlines()
    return where, dict(line.partition("=")[::2] for line in lines)


@pytest.mark.parametrize(("kind", "image"), [("pyxis", "co2.sqsh"), ("apptainer", "co2.sif")])
def test_a_container_sees_all_that_is_used_and_gets_the_jobs_settings(kind: str, image: str, tmp_path: Path):
    """And where links lead. No virtual environment is asked for: there is none at VENV, nor in the container's PATH."""
    (tmp_path / "sets").mkdir()
    (tmp_path / "link").symlink_to("sets")
    settings = {"CO2_DATA": str(tmp_path / "link"), "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"}
    more = {"IFACE": "bond0", "CONTAINER_MOUNTS": "/opt/a:/b", "MODEL": str(tmp_path / "no_model")}
    env = in_container(tmp_path, kind=kind, CONTAINER=os.path.relpath(tmp_path / image, ROOT), **settings, **more)
    ended = submit(env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    where, variables = began(tmp_path)
    assert where == str(ROOT)
    wanted = settings | {"NCCL_SOCKET_IFNAME": "bond0", "LOGS": f"{tmp_path}/runs/a/logs"}
    assert {key: variables[key] for key in wanted} == wanted, "the job's, not the image's"
    assert variables["PATH"] == str(tmp_path / "image"), "the image's"
    assert variables["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "[rank ${rank}] "
    assert variables["CO2_CACHE"] == f"{tmp_path}/home/.cache/co2"
    words = (tmp_path / ("srun_line" if kind == "pyxis" else "apptainer_line")).read_text().splitlines()
    folders = [str(ROOT), *(str(tmp_path / name) for name in ("home/.cache/co2", "link", "runs/a", "sets"))]
    if kind == "pyxis":
        mounts = next(word for word in words if word.startswith("--container-mounts="))
        assert f"--container-image={tmp_path}/co2.sqsh" in words and f"--container-workdir={ROOT}" in words
    else:
        mounts = words[words.index("--bind") + 1]
        assert words[:2] == ["exec", "--nv"] and words[words.index("--pwd") + 1] == str(ROOT)
        assert f"{tmp_path}/co2.sif" in words
    assert mounts.rpartition("=")[2].split(",") == [*(f"{path}:{path}" for path in sorted(folders)), "/opt/a:/b"]
    assert (tmp_path / "runs" / "a").is_dir(), "what is not there cannot be mounted"
