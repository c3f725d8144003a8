"""The Slurm scripts with their workers in a container, which a script plays: it begins in /, in its own environment."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm_fakes import ROOT, install

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
def test_the_payload_finds_the_repository_and_gets_what_it_needs(kind: str, image: str, tmp_path: Path):
    """No virtual environment is asked for: there is none at VENV, nor in the container's PATH."""
    settings = {"CO2_DATA": "/sets", "IFACE": "bond0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"}
    env = in_container(tmp_path, kind=kind, CONTAINER=str(tmp_path / image), **settings)
    ended = submit(env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    where, variables = began(tmp_path)
    assert where == str(ROOT)
    wanted = settings | {"NCCL_SOCKET_IFNAME": "bond0", "LOGS": f"{tmp_path}/runs/a/logs"}
    del wanted["IFACE"]
    assert {key: variables[key] for key in wanted} == wanted, "the job's, not the image's"
    assert variables["PATH"] == str(tmp_path / "image"), "the image's"
    assert variables["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "[rank ${rank}] "
    assert variables["CO2_CACHE"] == f"{tmp_path}/home/.cache/co2"


@pytest.mark.parametrize(("kind", "image"), [("pyxis", "co2.sqsh"), ("apptainer", "co2.sif")])
def test_the_container_sees_all_that_is_read_and_written_and_where_links_lead(kind: str, image: str, tmp_path: Path):
    (tmp_path / "sets").mkdir()
    (tmp_path / "link").symlink_to("sets")
    given = {"CO2_DATA": str(tmp_path / "link"), "CONTAINER_MOUNTS": "/opt/a:/b", "MODEL": str(tmp_path / "no_model")}
    env = in_container(tmp_path, kind=kind, CONTAINER=os.path.relpath(tmp_path / image, ROOT), **given)
    ended = submit(env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
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


def test_a_registrys_image_goes_to_pyxis_by_its_name(tmp_path: Path):
    assert submit(in_container(tmp_path, CONTAINER="me/co2:1")).returncode == 0
    assert "--container-image=me/co2:1" in (tmp_path / "srun_line").read_text().splitlines()


def test_srun_may_begin_anywhere_without_a_container_too(tmp_path: Path):
    """As with --container-image among SRUN_ARGS, or --export=NONE."""
    assert submit(in_container(tmp_path, VENV="", SRUN_ARGS="--container-image=co2.sqsh")).returncode == 0
    assert began(tmp_path)[0] == str(ROOT)


@pytest.mark.parametrize(
    ("image", "tools", "moved", "message"),
    [
        ("nowhere.sqsh", TOOLS, False, "nowhere.sqsh: no such file"),
        ("co2.sqsh", TOOLS, True, "error: the repository, /not/mounted, is not there"),
        ("co2.sqsh", ("bash", "env"), False, "no pkill on"),
    ],
)
def test_a_container_that_cannot_run_says_why(image: str, tools: tuple, moved: bool, message: str, tmp_path: Path):
    env = in_container(tmp_path, tools=tools, CONTAINER=str(tmp_path / image))
    if moved:
        srun = tmp_path / "srun"
        move = f'for word; do shift; [ "$word" != {ROOT} ] || word=/not/mounted; set -- "$@" "$word"; done; cd /'
        srun.write_text(srun.read_text().replace("cd /", move))
    ended = submit(env)
    assert ended.returncode == 2 and message in ended.stderr and not (tmp_path / "began").exists(), ended.stderr


def test_a_missing_virtual_environment_is_one_line_with_the_remedies(tmp_path: Path):
    ended = submit(in_container(tmp_path))
    assert ended.returncode == 2
    assert "error: no /nowhere/bin/activate: run make setup, or set VENV, CONDA_ENV or CONTAINER" in ended.stderr


@pytest.mark.slow
def test_the_real_torchrun_trains_from_the_containers_root(tmp_path: Path):
    small = {"RECIPE": "digits_small", "BATCH_SIZE": "", "CO2_DATA": str(tmp_path)}
    env = in_container(tmp_path, CONTAINER=str(tmp_path / "co2.sqsh"), **small)
    (tmp_path / "image" / "torchrun").unlink()
    (tmp_path / "image" / "torchrun").symlink_to(Path(sys.executable).parent / "torchrun")
    command = ["bash", "slurm/vision_a100.sh", "--device", "cpu", "--epochs", "1"]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())["steps"] == 22


# -- what the images are made of ----------------------------------------------------------------------------------

IMAGES = ROOT / "slurm" / "containers"


def dockerfile() -> list[list[str]]:
    """Its instructions, in words."""
    lines = (IMAGES / "Dockerfile").read_text().splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


def definition() -> tuple[dict[str, str], dict[str, list[list[str]]]]:
    """(header, section -> its lines in words) of apptainer's definition."""
    head, *parts = re.split(
        r"^%", re.sub("^#.*\n", "", (IMAGES / "co2.def").read_text(), flags=re.MULTILINE), flags=re.MULTILINE
    )
    sections = {part.split("\n")[0]: [line.split() for line in part.splitlines()[1:] if line] for part in parts}
    return dict(line.split(": ") for line in head.splitlines() if line), sections


def test_both_images_are_made_alike_from_constraints():
    base, copy, run, *rest = dockerfile()
    header, sections = definition()
    assert base == ["FROM", header["From"]] and header["Bootstrap"] == "docker"
    minor = re.search(r"Python (\d+\.\d+)", (ROOT / "constraints.txt").read_text())
    assert minor and header["From"].startswith(f"python:{minor[1]}-slim")
    *sources, target = copy[1:]
    files = {source: f"{target}{Path(source).name}" for source in sources}
    assert copy[0] == "COPY" and target.endswith("/") and dict(sections["files"]) == files
    assert "constraints.txt" in files and all((ROOT / source).is_file() for source in files)
    steps = ["sh", files["slurm/containers/install.sh"], files["constraints.txt"]]
    assert run == ["RUN", *steps] and sections["post"] == [steps]
    assert ["ENV", "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"] in rest
    assert ["ENV", "MELLANOX_VISIBLE_DEVICES=all"] in rest
    assert ["ENV", "PYTHONNOUSERSITE=1"] in rest and sections["environment"][0][:2] == ["export", "PYTHONNOUSERSITE=1"]


def test_their_steps_install_what_constraints_says_and_what_the_scripts_call(tmp_path: Path):
    """Run with stand-ins for all programs. The build fails where pip does, or torch has no CUDA."""
    steps = IMAGES / "install.sh"
    subprocess.run(["bash", "-n", steps], check=True, timeout=60)
    for name in ("apt-get", "rm", "python"):
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/ran\n[[ "$*" != *"$FAILS"* ]]\n')
        (tmp_path / name).chmod(0o755)

    def install_with(fails: str) -> tuple[int, list[str]]:
        (tmp_path / "ran").unlink(missing_ok=True)
        env = {"PATH": str(tmp_path), "FAILS": fails}
        ended = subprocess.run(["/bin/sh", steps, "/opt/co2/constraints.txt"], env=env, timeout=60)
        return ended.returncode, (tmp_path / "ran").read_text().splitlines()

    status, ran = install_with("nothing")
    assert status == 0
    packages = {"procps", "numactl", "g++", "git", "libgl1", "libglib2.0-0", "libibverbs1", "ibverbs-providers"}
    assert packages <= set(ran[1].split())
    (pip,) = [line for line in ran if "pip install" in line]
    assert pip.endswith("--requirement /opt/co2/constraints.txt")
    for fails in ("update", "pip install", "torch.version.cuda", "libibverbs.so.1", "import cv2"):
        assert install_with(fails)[0] != 0, fails
