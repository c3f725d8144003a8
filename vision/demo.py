"""The demo: ddp, slowmo, and co2 with the paper's and the recommended settings, over one slow link.

It prints a table and writes a plot: `python -m vision.demo [--link_mbit 50] [--epochs 10] [--out FOLDER]`.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from training.start.script import launch, parse_options

ROWS = {  # folder -> options
    "ddp": ["--method", "ddp"],
    "slowmo": ["--method", "slowmo"],
    "co2": ["--method", "co2", "--no_recommended"],
    "co2_recommended": ["--method", "co2", "--recommended"],
}


@dataclass(frozen=True)
class Demo:
    """Four workers on this machine's CPU train a small ResNet on scikit-learn's digits with each method in turn."""

    workers: int = 4
    epochs: int = 10
    tau: int = 16
    """Local steps per round, for slowmo and co2."""
    link_mbit: float = 50.0
    """Rate of the link that is emulated in software."""
    out: Path | None = None
    """The output folder. The default is runs/demo-DATE."""


def main() -> int:
    demo = parse_options(Demo, prog="python -m vision.demo", use_underscores=True)
    out = demo.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    print(
        f"{demo.workers} workers on this machine's CPU, scikit-learn's digits, {demo.epochs} epochs each.\n"
        f"The link between them is throttled in software to {demo.link_mbit:g} Mbit/s; it is not a real network.\n",
        flush=True,
    )
    for row in ROWS:
        status = train(demo, row, out / row)
        if status:
            print(f"error: {row} ended with status {status}; its output is above", file=sys.stderr)
            return 1
    summaries = {m: json.loads((out / m / "summary.json").read_text()) for m in ROWS}
    stopped = [m for m, s in summaries.items() if "stopped_by_signal" in s]
    if stopped:
        print(f"error: {stopped[0]} was stopped by a signal: no table", file=sys.stderr)
        return 1
    text = table(summaries)
    (out / "table.md").write_text(text + "\n")
    plot(out, out / "loss.png", demo)
    print(f"\n{text}\n\ntable        {out / 'table.md'}\nplot         {out / 'loss.png'}")
    print(f"tensorboard  {Path(sys.executable).with_name('tensorboard')} --logdir {out}")
    return 0


def train(demo: Demo, row: str, folder: Path) -> int:
    """Runs one training under torchrun. Returns its exit status."""
    torchrun = [sys.executable, "-m", "training.launch", "--standalone", f"--nproc-per-node={demo.workers}"]
    recipe = ["-m", "vision.train", "digits_small", *ROWS[row], "--device", "cpu"]
    settings = {
        "epochs": demo.epochs,
        "eval_every": demo.epochs,
        "checkpoint_every": 0,
        "log_every": 4,
        "link_mbit": demo.link_mbit,
        "co2.tau": demo.tau,
        "out": folder,
    }
    options = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.run([*torchrun, *recipe, *options], env=env).returncode


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """Returns a Markdown table with one row per method, and speed-ups over ddp."""
    lines = ["| method | test top-1 | steps/s | communication hidden | speed-up over ddp |", "|---|---|---|---|---|"]
    for method, s in summaries.items():
        speed_up = s["steps_per_second"] / summaries["ddp"]["steps_per_second"]
        lines.append(
            f"| {method} | {s['test_top1']:.1%} | {s['steps_per_second']:.2f} | {s['hidden_share']:.0%} "
            f"| {speed_up:.1f} x |"
        )
    return "\n".join(lines)


def plot(folder: Path, path: Path, demo: Demo) -> None:
    """Plots training loss against seconds of training, with one line per method."""
    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for method in ROWS:
        rows = [json.loads(line) for line in (folder / method / "metrics.jsonl").read_text().splitlines()]
        points = [(row["seconds"], row["train_loss"]) for row in rows if "train_loss" in row]
        axes.plot(*zip(*points, strict=True), label=method)
    axes.set(xlabel="seconds of training", ylabel="training loss (rank 0)", xscale="log", yscale="log")
    link = f"link throttled in software to {demo.link_mbit:g} Mbit/s"
    axes.set_title(f"scikit-learn's digits, {demo.workers} workers, {link}", fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    launch(lambda: sys.exit(main()))
