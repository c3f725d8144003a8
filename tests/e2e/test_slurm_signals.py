"""What a Slurm script does at a signal, and at its run's end; with the slow marker, the real torchrun."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.slurm_fakes import FAKES, ROOT, SCRIPTS, SMALL, WORK, install, start, wait_for

# -- signals ------------------------------------------------------------------------------------------------------


def begun(folder: Path, **env: str) -> subprocess.Popen[str]:
    """A job whose workers run."""
    programs = {"torchrun": WORK} | {name: env.pop(name) for name in ("torchrun", "worker") if name in env}
    job = start("slurm/vision_a100.sh", install(folder, **programs) | {"OUT": str(folder)} | env)
    wait_for(folder / "ready", job)
    return job


@pytest.mark.parametrize("refused", [False, True])
def test_the_signal_reaches_the_workers_and_the_job_is_requeued(refused: bool, tmp_path: Path):
    if refused:
        (tmp_path / "refuse").touch()
    job = begun(tmp_path)
    job.send_signal(signal.SIGUSR1)  # to the batch script alone, as --signal=B: does
    text, _ = job.communicate(timeout=60)
    assert "job 17 was told to stop, and its run has saved: back into the queue" in text
    if refused:
        assert job.returncode == 1 and "not requeued; submit it again" in text
    else:
        assert job.returncode == 0 and (tmp_path / "requeued").read_text() == "17\n", text


def test_a_run_that_has_ended_is_not_requeued(tmp_path: Path):
    """The signal came in its last minutes."""
    job = begun(tmp_path, SUMMARY='{"steps": 22}')
    job.send_signal(signal.SIGUSR1)
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and not (tmp_path / "requeued").exists(), text


@pytest.mark.parametrize(("when", "requeued"), [("2026-01-02T03:04:05", True), ("None", False)])
def test_a_stopped_run_is_requeued_if_it_was_preempted_but_not_if_it_was_cancelled(when: str, requeued: bool, tmp_path):
    """Slurm has sent SIGTERM to all processes, torchrun's among them."""
    (tmp_path / "job").write_text(f"JobState=RUNNING PreemptTime={when}")
    job = begun(tmp_path)
    subprocess.run(["pkill", "-TERM", "-P", str(job.pid)], check=True)
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and (tmp_path / "requeued").exists() == requeued, text


def test_a_run_that_does_not_stop_in_time_is_requeued_before_the_limit(tmp_path: Path):
    """The workers ignore the signal, as in a round that is too long."""
    job = begun(tmp_path, torchrun='touch "$FAKES/ready"; until [ -e "$FAKES/enough" ]; do sleep 0.1; done')
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
    env = install(tmp_path) | {"RECIPE": small, "BATCH_SIZE": "", "CO2_DATA": str(tmp_path), "OUT": f"{tmp_path}/run"}
    how = {"env": env, "capture_output": True, "text": True, "timeout": 300}
    result = subprocess.run(["bash", script, "--dry_run", "--device", "cpu"], cwd=ROOT, **how)
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
    job = start("slurm/vision_3090.sh", env, *options, "--epochs", str(epochs), "--extend")
    text, _ = job.communicate(timeout=240)
    assert job.returncode == 0 and (tmp_path / "requeued").read_text() == "17\n", f"not once more: {text}"
    finished = json.loads((run / "summary.json").read_text())
    assert finished["steps"] == 22 * epochs and "stopped_by_signal" not in finished
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "train_loss" in row]
    assert steps == sorted(set(steps)), "no step is trained twice"
