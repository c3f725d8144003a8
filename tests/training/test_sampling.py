"""Which samples a worker sees."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core import UserError
from training.data import epoch_batches, eval_share, generator, load_batches, mix, per_worker, steps_per_epoch

ROOT = Path(__file__).resolve().parents[2]


def shares(world_size: int, epoch: int = 0, seed: int = 0) -> torch.Tensor:
    """[steps, batch] of all workers side by side."""
    parts = [epoch_batches(103, 12, seed=seed, epoch=epoch, rank=r, world_size=world_size) for r in range(world_size)]
    return torch.cat(parts, dim=1)


def test_a_key_gives_always_the_same_number_and_generator_and_others_give_others():
    assert mix(0, 1, 2) == 8427206145701047172, "runs that are resumed go on with the same data"
    assert len({mix(0, i) for i in range(1000)} | {mix(i, 0) for i in range(1, 1000)}) == 1999
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0)]
    draws = {torch.rand(3, generator=generator(*key)).sum().item() for key in keys}
    assert len(draws) == len(keys)
    assert torch.equal(torch.rand(3, generator=generator(5, 6)), torch.rand(3, generator=generator(5, 6)))


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own_whatever_the_workers():
    seen = shares(4).flatten()
    assert len(seen) == 96 and len(seen.unique()) == 96 and seen.min() >= 0 and seen.max() < 103
    assert torch.equal(shares(1), shares(3)) and torch.equal(shares(1), shares(4))
    assert not torch.equal(shares(2), shares(2, epoch=1)) and not torch.equal(shares(2), shares(2, seed=1))
    assert not torch.equal(shares(2, epoch=1), shares(2, seed=1)), "neighbouring keys must not coincide"


def test_eval_share_partitions_the_samples():
    parts = [list(eval_share(10, rank=r, world_size=3)) for r in range(3)]
    assert sorted(sum(parts, [])) == list(range(10)) and max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_batch_that_does_not_divide_or_is_larger_than_the_data_is_refused():
    for batch, workers in ((10, 4), (0, 2), (-4, 2)):
        with pytest.raises(UserError, match=f"batch_size={batch} .* multiple of {workers}"):
            per_worker(batch, workers)
    assert steps_per_epoch(100, 30) == 3
    with pytest.raises(UserError, match="batch_size=200 .* exceeds the 100 training samples"):
        steps_per_epoch(100, 200)


def test_repeated_augmentation_spreads_the_copies_of_a_third_of_the_samples_over_the_workers():
    """As DeiT's sampler: the copies of a sample stand side by side, and neighbours go to different workers."""
    n, of = 30, dict(seed=0, epoch=0, world_size=3, repeats=3)
    ranks = [epoch_batches(n, 9, rank=rank, **of) for rank in range(3)]
    batches = torch.stack(ranks, dim=-1).flatten(1)  # [steps, 9], as they stood in the shuffle
    assert batches.shape == (3, 9)
    for batch in batches:
        samples = batch % n
        assert torch.equal(samples.view(3, 3), samples[::3, None].expand(3, 3)) and len(samples.unique()) == 3
        assert (batch // n).tolist() == [0, 1, 2] * 3, "each copy has a number of its own, which seeds its augmentation"
    assert all(len((share % n).unique()) == 9 for share in ranks), "no worker sees a sample twice"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_loading_processes_outlive_the_signals_that_stop_a_run(number: signal.Signals):
    """Slurm sends them to all processes of a job; the worker still takes the batches of its last rounds."""
    others = multiprocessing.active_children()
    batches = load_batches(torch.arange(40), iter([[i] for i in range(40)]), 2)  # type: ignore[arg-type]
    seen = [next(batches).item() for _ in range(2)]  # one of each process
    loading = [process for process in multiprocessing.active_children() if process not in others]
    assert len(loading) == 2
    for process in loading:
        os.kill(process.pid, number)
    assert seen + [batch.item() for batch in batches] == list(range(40))


LEFT_OPEN = """
import gc
from core import UserError
from training.data import load_batches

class Broken:
    def __getitem__(self, index):
        if index:
            raise UserError("a broken file")
        return 0

batches = load_batches(Broken(), iter([[0], [1], *[[0]] * 9]), 2)
kept = next(batches) if ending != "broken" else None
gc.disable()
try:
    if ending == "broken":
        kept = list(batches)
except UserError as error:
    kept = error
if ending == "crash":
    raise RuntimeError("in the loop")
"""


@pytest.mark.parametrize("ending", ["broken", *(pytest.param(e, marks=pytest.mark.slow) for e in ("open", "crash"))])
def test_no_loading_process_holds_up_the_end_of_its_worker(ending: str) -> None:
    command = [sys.executable, "-c", f"ending = {ending!r}\n{LEFT_OPEN}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == (ending == "crash"), ended.stderr
    assert "DataLoader" not in ended.stderr, "the end of the processes is no failure"
