"""GPT-2 Small, 124 M parameters, with the methods of bench.search, all workers in one process on the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from bench.gpu.checks import NotRun, Scope, check, one_line
from bench.gpu.equal import ROOT

METHODS = {
    "ddp": "ddp",
    "local": "local",
    "local over int4": "local:wire=int4",
    "paper": "co2:beta=0.5",
    "recommended": "co2:merge=keep,gap=none,beta=0,delay=1,wire=int4",
}
STEPS, TAU, WORKERS = 1000, 24, 4


@check("search", cases=METHODS, limit=590.0)
def loss_of_gpt2_small(scope: Scope, case: str) -> dict[str, Any]:
    """Four workers, tau 24, one learning rate for all, one seed; the loss is that of four held-out books."""
    small = ("digits", 3, 1, 2) if scope.tiny else ("gpt2_small", STEPS, TAU, WORKERS)
    if not scope.cuda and not scope.tiny:
        raise NotRun("1,000 steps of 124 M parameters need a CUDA device")
    task, steps, tau, workers = small
    rows = scope.out / "gpu_search.jsonl"
    settings = {"tasks": task, "steps": steps, "tau": tau, "workers": workers, "seeds": 0, "lr_factors": 1}
    options = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "bench.search", *options, "--methods", METHODS[case], "--configurations", "2"]
    command += ["--rows", str(rows), "--device", scope.device]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    if "no Gutenberg books in" in done.stderr:
        raise NotRun(one_line(done.stderr))
    assert done.returncode == 0, f"status {done.returncode}: {one_line(done.stderr, 500)}"
    found = [json.loads(text) for text in rows.read_text().splitlines()]
    choice = [row for row in found if row["kind"] == "choice" and row["asked"] == METHODS[case]][-1]
    keys = ("task", "steps", "method", "options", "workers")
    row = [row for row in found if row["kind"] == "run" and all(row[k] == choice[k] for k in keys)][-1]
    assert row["loss"] is not None, "diverged"
    return {"held-out loss": row["loss"], "before the end's drain": row["loss_of_mean"], "seconds": row["seconds"]}
