"""Compares training here with training at an earlier commit, bit for bit.

    python tests/equal_to.py 1d1dd1b            # every case
    python tests/equal_to.py 1d1dd1b paper keep # only the cases whose names contain one of these words

Makes a git worktree of the commit in a temporary folder. Runs the same cases there and here, on two gloo processes
each, and compares SHA-256 digests of the parameters and buffers after every step, and of the tensors in the method's
state after the last one. Keys of the state are not compared, so that they may be renamed. The cases that resume save
in mid-round, and go on from there with new objects. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent.parent
WORKERS = 2


LATE = {"merge": "keep_local", "gap": "none", "outer_momentum": 0.0, "delay": 2}
LGRECO = {"compression": {"format": "lgreco", "like": "int4", "lgreco": {"every": 3, "first": 2}}, "tau": 2}
INT4, INT8, PARTS = {"compression": "int4"}, {"compression": "int8"}, LATE | {"fragments": 4, "delay": 1}
AUTO, UNEVEN, NAN = {"delay": "auto"}, {"batch_norm": True, "fewer": 6}, {"nan_at": 14}
MOMENTUM = {"outer_momentum": 0.3}
# name -> (CO2's settings, what else differs from train()). A name with a star is also resumed
WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "paper": ({}, {}),
    "paper, float64": ({}, {"dtype": "float64"}),
    "paper, gap norm": ({"gap": "norm"}, {}),
    "paper, clip": ({"clip": 1e-3}, {}),
    "paper, no clip, momentum 0.2": ({"clip": None, "outer_momentum": 0.2}, {}),
    "paper, tau 1": ({"tau": 1}, {}),
    "paper, bfloat16*": ({}, {"dtype": "bfloat16"}),
    "paper, batch norm, uneven finish*": ({}, UNEVEN),
    "paper, a NaN": ({}, NAN),
    "paper, schedule": ({}, {"schedule": True}),
    "keep*": (LATE, {}),
    "keep, a NaN": (LATE, NAN),
    "keep, bfloat16": (LATE, {"dtype": "bfloat16"}),
    "keep, delay 0": (LATE | {"delay": 0}, {}),
    "keep, delay boundary, momentum 0.2": (LATE | {"delay": "boundary", "outer_momentum": 0.2}, {}),
    "keep, as soon as it is there": (LATE | AUTO, {"at_once": True}),
    "keep, batch norm, uneven finish*": (LATE, UNEVEN),
    "outer, delay 0*": ({"delay": 0, "gap": "none"}, {}),
    "fragments": (PARTS, {}),
    "fragments, outer momentum, uneven finish": (PARTS | MOMENTUM, {"fewer": 6}),
    "fragments, auto, a NaN": (PARTS | AUTO, NAN | {"at_once": True}),
    "fragments, int4*": (PARTS | INT4 | MOMENTUM, {}),
    "fragments, int4, auto*": (PARTS | INT4 | AUTO, {"at_once": True}),
    "fragments, two to a node*": (PARTS | MOMENTUM, {"per_node": 2}),
    "int8, error feedback*": (INT8, {}),
    "int4, error feedback, keep*": (LATE | INT4, {}),
    "bfloat16 wire, batch norm": ({"compression": "bfloat16"}, {"batch_norm": True}),
    "lgreco": (LGRECO, {}),
    "lgreco, keep*": (LATE | LGRECO, {}),
    "sharded*": ({}, {"make": {"shard": True}}),
    "sharded, batch norm, uneven finish": ({}, UNEVEN | {"make": {"shard": True}}),
    "sharded, a NaN": ({}, NAN | {"make": {"shard": True}}),
    "sharded, two to a node": ({}, {"make": {"shard": True}, "per_node": 2}),
    "sharded, offload*": ({}, {"make": {"offload": True}}),
    "local*": ({}, {"method": "local"}),
    "local, batch norm, uneven finish": ({}, UNEVEN | {"method": "local"}),
    "local, int8": (INT8, {"method": "local"}),
    "slowmo*": ({}, {"method": "slowmo"}),
    "slowmo, a NaN": ({}, NAN | {"method": "slowmo"}),
    "overlap_local*": ({}, {"method": "overlap_local"}),
    "overlap_local, a NaN": ({}, NAN | {"method": "overlap_local"}),
    "nesterov*": ({"nesterov": True, "outer_lr": 0.5, "outer_momentum": 0.5}, {}),
    "diloco": ({"nesterov": True, "delay": 0, "gap": "none", "outer_lr": 0.5}, {}),
    "ddp": ({}, {"method": "ddp", "batch_norm": True}),
    "ddp, int8*": ({}, {"method": "ddp", "ddp_compression": "int8"}),
    "paper, no outlier filter": ({"outlier": None}, {}),
}
CASES = {name.strip("*"): {"co2": co2} | more for name, (co2, more) in WRITTEN.items()}
CASES |= {f"resume: {name[:-1]}": CASES[name[:-1]] for name in WRITTEN if name.endswith("*")}


# -- in a worker ---------------------------------------------------------------------------------------------------


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the bits of all, in their order."""
    summed = hashlib.sha256()
    for t in tensors:
        summed.update(f"{t.dtype} {tuple(t.shape)}".encode())
        summed.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return summed.hexdigest()[:16]


def tensors_in(state: Any, path: str = "") -> Iterator[Tensor]:
    """All tensors, but for the flat ones that travel: those hold measured times, too. L-GreCo's error feedback lies in
    slots for the widest format, so only what follows from it is compared: payloads and parameters."""
    if isinstance(state, dict) and "allocation" in state:
        return
    if isinstance(state, Tensor) and "flats" not in path:
        yield state
    elif isinstance(state, dict | list | tuple):
        for name, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from tensors_in(value, f"{path}/{name}")


def made(what: dict[str, Any]) -> tuple[Any, Any, Any, Any, Callable[..., Any]]:
    """The model, what the loop calls, the optimiser, the method, and a batch."""
    import core

    def compression(given: Any) -> Any:
        given = {"format": given} if isinstance(given, str) else given
        more = {"lgreco": core.LGrecoConfig(**given["lgreco"])} if "lgreco" in given else {}
        return core.CompressionConfig(**(given | more))

    rank, dtype = dist.get_rank(), getattr(torch, what.get("dtype", "float32"))
    torch.manual_seed(rank)  # the first worker's values must reach all
    norm = [nn.BatchNorm1d(24)] if what.get("batch_norm") else []
    layers = [nn.Linear(16, 24), *norm, nn.Tanh(), nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16)]
    model = nn.Sequential(*layers).to(dtype)
    more: dict[str, Any] = dict(what.get("make", {}))
    if what.get("per_node"):
        more["mesh"] = core.node_mesh("cpu", what["per_node"])
    if what.get("schedule"):
        more["schedule"] = lambda number: {"tau": 2 + number % 3, "outer_lr": 0.5 + number / 10}
    co2 = {"tau": 4} | what["co2"]
    if "compression" in co2:
        co2["compression"] = compression(co2["compression"])
    if "ddp_compression" in what:
        more["ddp_compression"] = compression(what["ddp_compression"])
    called, method = core.make_method(what.get("method", "co2"), model, co2=core.CO2Config(**co2), timeout=60.0, **more)
    if what.get("at_once"):
        flight = method.allreduce
        flight.arrived = lambda: not flight.in_flight or flight.drain()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.0 if "nan_at" in what else 0.5)
    return model, called, optimizer, method, lambda data: torch.randn(8, 16, generator=data).to(dtype)


STEPS, SAVED_AT = 26, 13


def train(what: dict[str, Any], folder: Path, *, resumes: bool, again: bool = False) -> list[str]:
    """The digests after every step, after finish() and of the state. again: from the checkpoint in the folder."""
    import core

    rank = dist.get_rank()
    model, called, optimizer, method, batch = made(what)
    data, seen, first = torch.Generator().manual_seed(100 + rank), [], 0
    if again:
        first = core.load(folder, model, optimizer, method)
        assert first == SAVED_AT, first
    for step in range(STEPS - rank * what.get("fewer", 0)):
        inputs = batch(data)
        if step < first:
            continue
        called(inputs).square().mean().backward()
        if step == what.get("nan_at") and rank == 1:
            next(model.parameters()).grad.fill_(float("nan"))
        optimizer.step(), optimizer.zero_grad(), method.step()
        seen.append(digest([*model.parameters(), *model.buffers()]))
        if resumes and not again and step + 1 == SAVED_AT:
            assert core.save(folder, model, optimizer, method, step=SAVED_AT)
    in_mid_round = sorted(digest([t]) for t in tensors_in(method.state_dict())) if not what.get("fewer") else []
    payloads = [digest([b.payload for b in getattr(method, "buckets", [])])] if in_mid_round else []
    method.finish()
    seen.append(digest([*model.parameters(), *model.buffers()]))
    ended = sorted(digest([t]) for t in tensors_in(method.state_dict()))
    method.close()
    return [*seen, *payloads, "state", *in_mid_round, "state at the end", *ended]


def work(root: Path, folder: Path, rank: int, words: list[str]) -> None:
    warnings.simplefilter("ignore")
    import core

    assert Path(core.__file__).is_relative_to(root), core.__file__
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORKERS)
    seen = {}
    for name, what in CASES.items():
        resumes = name.startswith("resume: ")
        for again in (False, True)[: 1 + resumes] if not words or any(word in name for word in words) else ():
            seen[f"{name}, rank {rank}{', resumed' * again}"] = train(what, folder / name, resumes=resumes, again=again)
    Path(folder, f"seen.{rank}").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


# -- in the first process ------------------------------------------------------------------------------------------


def run(root: Path, folder: Path, words: list[str]) -> dict[str, Any]:
    """What every worker has seen, by case. -P: nothing comes from the folder of this file."""
    folder.mkdir()
    env = os.environ | {"PYTHONPATH": str(root), "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", __file__, "--work", str(root), str(folder)]
    ranks = [subprocess.Popen([*command, str(rank), *words], cwd=root, env=env) for rank in range(WORKERS)]
    if any([process.wait() for process in ranks]):
        raise SystemExit(f"the cases failed in {root}")
    return {name: seen for file in folder.glob("seen.*") for name, seen in json.loads(file.read_text()).items()}


def compare(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    problems = [f"{name}: not run on both sides" for name in before.keys() ^ now.keys()]
    for name in [n for n in before if n in now]:
        (moves, old), (moves_now, new) = (seen_and_state(s[name]) for s in (before, now))
        if moves != moves_now:
            first = next((i for i, (a, b) in enumerate(zip(moves, moves_now, strict=False)) if a != b), "length")
            problems.append(f"{name}: parameters differ from step {first} on, of {len(moves)}")
        elif old - new:
            problems.append(f"{name}: {sum((old - new).values())} tensors of the state are not found here")
        elif len(set(moves)) < 3:
            problems.append(f"{name}: nothing has moved")
    return problems


def seen_and_state(seen: list[str]) -> tuple[list[str], Counter[str]]:
    """What is compared in its order, and what is only to be found again: new tensors are no difference."""
    at = seen.index("state")
    return seen[:at], Counter(seen[at:])


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        root, folder, rank, *words = sys.argv[2:]
        return work(Path(root), Path(folder), int(rank), words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("words", nargs="*", help="run only the cases whose names contain one of these")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        there, results = Path(folder, "there"), {}
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(there), given.commit], check=True)
        try:
            for root in (there, HERE):
                results[root] = run(root, Path(folder, f"of_{len(results)}"), given.words)
        finally:
            subprocess.run([*git, "remove", "--force", str(there)], check=False)
    problems = compare(results[there], results[HERE])
    print("\n".join(problems) or f"equal, bit for bit: {len(results[HERE])} runs of {len(CASES)} cases")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
