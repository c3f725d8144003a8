"""Elastic runs of the language models' train script by method zo: a worker dies, and one comes back by replaying."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from bench.chaos.crew import Crew
from core import testing
from core.checkpoints import checkpoint
from core.methods import ElasticZeroth
from language.zeroth import ScalarLog, ZerothOrder
from language.zeroth.forward import Loss
from language.zeroth.weights import digest
from language import zo_replay
from language.corpora import open_corpus
from language.finetune import tune
from language.recipe import LanguageRecipe
from language.train import initial, make_objective, train
from tests.e2e.test_finetune import tiny as tiny_finetune
from tests.e2e.test_finetune import weights
from tests.e2e.test_language import OPTIM, ZO, tiny
from tests.runs import logged, rows, summary
from tests.tiny_models import make_model, make_prompts
from training.run import Run

DIES_AT, WAITS_AT = 8, 14  # steps


def recipe_of(folder: Path, **changes) -> LanguageRecipe:
    sizes = {"epoch_steps": 20, "batch_size": 12, "log_every": 1, "eval_every": 1}
    return tiny(out=folder / "run", elastic=True, timeout=120.0, **ZO | sizes | changes)


def worker(folder: str, changes: dict) -> None:
    """language.train; 1.0 is killed, and the others wait once until it is about to join again."""
    name, came = os.environ["CO2_WORKER"], Path(folder, "came")
    measure, join, end = ElasticZeroth.measure, ElasticZeroth.join, Run.end

    def measures(self: ElasticZeroth, loss: Loss, count: float) -> torch.Tensor:
        if name == "1.0" and self.rounds == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        while self.rounds == WAITS_AT and not came.exists():
            time.sleep(0.05)
        time.sleep(0.05)
        return measure(self, loss, count)

    def joins(self: ElasticZeroth, *args) -> bool:
        if name == "1.1":
            came.touch()
        joined = join(self, *args)
        Path(folder, f"{name}.joined").write_text(f"{int(joined)} {self.rounds}")
        return joined

    def ends(self: Run, results: dict) -> None:
        Path(folder, f"{name}.weights").write_text(digest(list(self._trained.model.parameters())))
        end(self, results)

    ElasticZeroth.measure, ElasticZeroth.join, Run.end = measures, joins, ends
    recipe = recipe_of(Path(folder), **changes)
    corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    with Run(recipe) as run:
        train(run, recipe, corpus, make_objective(recipe, corpus), {"val": corpus.val[:3000]})


def go(folder: Path, restarts: int, **changes) -> dict[str, str]:
    """The weights of each worker at the end."""
    crew = Crew(testing._context(), worker, (str(folder), changes), 3, restarts, late=550)
    assert crew.run() == 0 and not crew.timed_out
    return {path.stem: path.read_text() for path in folder.glob("*.weights")}


@pytest.mark.slow
def test_a_worker_is_lost_another_replays_the_run_and_it_is_resumed(tmp_path: Path):
    weights = go(tmp_path, 1, epochs=3)
    assert set(weights) == {"0.0", "1.1", "2.0"} and len(set(weights.values())) == 1
    joined, steps = map(int, (tmp_path / "1.1.joined").read_text().split())
    assert joined == 1 and WAITS_AT < steps < 60
    assert logged(tmp_path / "run", "workers") == ["2 workers: 1.0 lost", "3 workers: 1.1 came"]
    steps = [row["step"] for row in rows(tmp_path / "run") if "train_loss" in row]
    assert steps == list(range(1, 61)), "each step once, also where one was given up"
    assert all(loss > 0 for loss in logged(tmp_path / "run")) and summary(tmp_path / "run")["steps"] == 60

    found = checkpoint.load(tmp_path / "run" / "checkpoints", rank=0)
    assert found is not None and "model" not in found[0]
    log = ScalarLog.from_state(found[0]["method"]["state"]["log"])
    recipe = recipe_of(tmp_path)
    torch.manual_seed(recipe.seed * 1_000_003)
    corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    model = initial(recipe, corpus.pad)
    ZerothOrder(model, recipe.zeroth, lr=0.0).replay(log)
    assert {digest(list(model.parameters()))} == set(weights.values()), "the checkpoint is the list of scalars"
    assert max(path.stat().st_size for path in (tmp_path / "run").glob("checkpoints/*/*")) < 20_000

    resumed = go(tmp_path, 0, epochs=4, resume=True, extend=True)
    assert len(set(resumed.values()) - set(weights.values())) == 1, "three workers hold the same new weights"
    assert summary(tmp_path / "run")["steps"] == 80


def tuner(folder: str) -> None:
    """language.finetune; the worker that would write the model is killed."""
    measure = ElasticZeroth.measure

    def measures(self: ElasticZeroth, loss: Loss, count: float) -> torch.Tensor:
        if os.environ["CO2_WORKER"] == "0.0" and self.rounds == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return measure(self, loss, count)

    ElasticZeroth.measure = measures
    tune(tiny_finetune(Path(folder), out=Path(folder, "run"), method="zo", optim=OPTIM, elastic=True, timeout=60.0))


@pytest.mark.slow
def test_a_tuned_model_is_written_by_one_that_lives(tmp_path: Path):
    make_model(tmp_path / "model")
    make_prompts(tmp_path / "data")
    crew = Crew(testing._context(), tuner, (str(tmp_path),), 2, late=400)
    assert crew.run() == 0 and not crew.timed_out
    assert logged(tmp_path / "run", "workers") == ["1 workers: 0.0 lost"]
    zo_replay.replay(tmp_path / "run" / "replay", tmp_path / "model", tmp_path / "out")
    first, tuned, again = (weights(tmp_path / name) for name in ("model", "run/model", "out"))
    assert all(torch.equal(tuned[name], again[name]) for name in tuned | again)
    assert not all(torch.equal(tuned[name], first[name]) for name in first)
