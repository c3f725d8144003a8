"""Runs of language.train whose islands split their documents, beside runs of whole ones; and what is refused."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from core import CO2Config
from core.errors import UserError
from core.testing import run_distributed
from language.lengths import dealt
from language.lengths.dealt import Dealt, island_of
from language.recipe import LanguageRecipe, RingsConfig
from language.recipes import gpt2_pydoc_small
from tests.on_ranks import on_ranks, total_world_size
from tests.problems import flat
from training.loop.run import Run

END, STEPS = 0, 11
SPLIT = RingsConfig(costs=(1.0, 0.0, 0.0, 0.0))  # attention alone costs anything, and hops are free
SIZES = {"vocab_size": 64, "context": 80, "batch_size": 4, "epoch_steps": STEPS, "epochs": 1}
WHOLE = replace(gpt2_pydoc_small(), **SIZES, balance="round", recommended=False, log_every=2)
WHOLE = replace(WHOLE, device="cpu", optim=replace(WHOLE.optim, warmup_steps=2), co2=CO2Config(tau=3))
ISLANDS = replace(WHOLE, balance="rings", rings=SPLIT, per_node=2)
BY_DDP = {"method": "ddp", "accumulate": 2}
Trained = tuple[Tensor, list[float]]  # parameters at the end, and the training losses that were logged


def corpus():
    """300 documents of random tokens, some of them longer than the model's positions."""
    from language.data import Corpus

    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(3.3, 1.0, 300).astype(int) + 2, 200)
    tokens = rng.integers(1, 64, lengths.sum()).astype(np.uint16)
    tokens[np.cumsum(lengths) - 1] = END
    return Corpus(Path("none"), tokens, tokens[:161], 64, END)


def trained(rank: int, ranks: int, folder: str, jobs: dict[str, LanguageRecipe]) -> dict[str, Trained]:
    """Runs of a GPT-2 in float64; a job that ends in "stopped" does so after 5 steps."""
    from language import train
    from language.model import GPT2_SIZES
    from tests.e2e.test_language import stop_after
    from tests.runs import logged

    if ranks > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    GPT2_SIZES["gpt2_tiny"] = dict(n_layer=2, n_head=4, n_embd=32)
    found, text = {}, corpus()
    for name, recipe in jobs.items():
        recipe = replace(recipe, out=recipe.out or Path(folder, name))
        with Run(recipe) as run:
            if name.endswith("stopped"):
                stop_after(run, 5)
            model = run.shard(train.make_model(recipe, None).double())
            train.learn(run, recipe, model, train.TextTask(text, train.make_objective(recipe, text), text.val, {}))
        found[name] = flat(model.parameters()), logged(recipe.folder)
    return found


def assert_alike(found: list[dict[str, Trained]], expected: Trained) -> None:
    """On all ranks, for all runs: parameters, and losses, which the first rank has logged."""
    for of_rank in found:
        for params, losses in of_rank.values():
            torch.testing.assert_close(params, expected[0], rtol=0, atol=1e-10)
            assert losses == pytest.approx(expected[1], abs=1e-10)


def test_an_island_that_splits_its_documents_trains_as_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from language.model import GPT2_SIZES

    split = replace(ISLANDS, **BY_DDP)
    jobs = {"split": split, "measured": replace(split, rings=RingsConfig())}
    found = run_distributed(trained, 2, str(tmp_path), jobs, timeout=120)
    monkeypatch.setitem(GPT2_SIZES, "gpt2_tiny", {})
    assert_alike(found, trained(0, 1, str(tmp_path), {"whole": replace(WHOLE, **BY_DDP)})["whole"])


@pytest.mark.slow
def test_islands_train_as_as_many_workers_also_when_stopped_and_resumed(tmp_path: Path):
    folder, halves = str(tmp_path), tmp_path / "halves"
    expected, _ = run_distributed(trained, 2, folder, {"whole": WHOLE}, timeout=120)
    jobs = {
        "split": ISLANDS,
        "measured": replace(ISLANDS, rings=RingsConfig()),
        "zero": replace(ISLANDS, zero=1),
        "recomputed": replace(ISLANDS, recompute=True),
        "stopped": replace(ISLANDS, out=halves),
        "resumed": replace(ISLANDS, out=halves, resume=True),
    }
    found = run_distributed(trained, 4, folder, jobs, timeout=240)
    for of_rank in found:
        of_rank.pop("stopped")
    assert_alike(found, expected["whole"])


CONFIG = SimpleNamespace(hidden_size=4, num_hidden_layers=2)


@pytest.mark.slow  # four processes import transformers
@on_ranks(4)
def test_all_ranks_plan_with_the_slowest_ranks_costs(rank: int):
    """4 ranks on 2 machines: the last rank's times are 9 and 5 s, hops 4 s."""
    from training.start.workers import make_mesh

    mesh = make_mesh(torch.device("cpu"), 4, 0, 60.0)
    assert mesh is not None
    with pytest.MonkeyPatch.context() as patch:
        times = iter([6.0 + rank, 2.0 + rank, *[1.0 + rank] * 4])
        patch.setattr(dealt, "least_seconds", lambda *_: next(times))
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        model = SimpleNamespace(parameters=lambda: iter([torch.zeros(1)]), config=CONFIG)
        of = island_of(replace(ISLANDS, rings=RingsConfig()), model, mesh, 16, contextlib.nullcontext())
    dealt_out = Dealt(None, 1.0, *of)  # pyright: ignore[reportArgumentType]
    documents = [(torch.ones(n, dtype=torch.int64), torch.ones(n, dtype=torch.int64)) for n in (100, 9, 60)]
    island, tokens = dealt_out.island, total_world_size(dealt_out.row(documents).ids.numel())
    assert total_world_size(island) == [island] * 4 and island.nodes == island.devices == 2
    assert island.attention == pytest.approx((9 - 5) / (2 * 16**2 * (1 - 1 / 8)))
    assert island.linear == pytest.approx((5 / 2 - island.attention * 16**2 / 8) / 16)
    assert island.inside == island.across == (12.0, 0.0)
    assert sum(tokens) == 169 and dealt_out.row([]).ids.numel() == 1


def test_rings_in_32_bits_on_a_gpu_are_refused():
    """CUDA's flash attention computes in 16 bits. The run is a stand-in."""
    run = SimpleNamespace(mesh=SimpleNamespace(size=lambda _: 2), device=torch.device("cuda"))
    documents = SimpleNamespace(lengths=np.ones(9))
    with pytest.raises(UserError, match="precision='float32': on a GPU give --precision bfloat16 or float16"):
        Dealt.of(ISLANDS, torch.nn.Identity(), documents, run)  # pyright: ignore[reportArgumentType]
    assert ISLANDS.data_workers(4) == 2 and WHOLE.data_workers(4) == 4
