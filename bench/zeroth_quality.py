"""Fine-tuning a tiny GPT-2 with and without gradients, for bench/zeroth.py: learning rates chosen, losses over time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import report, trainings
from bench.cluster import Cluster
from bench.report import Asked, mean_sd, require
from bench.trainings import FAST, TUNING_SEED, best_lr
from core.errors import UserError
from language.corpora import open_corpus, open_wikitext2
from language.recipe import LanguageRecipe
from language.recipes import gpt2_pydoc_small, gpt2_zo_small
from language.train import make_objective, train
from training.run import Run

TUNED_AS = {"MeZO, one process": "zo"}  # the same steps
BASE_EPOCHS = 3  # of the run on Python's documentation whose model goes on
LRS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # that tuning tries for methods without gradients
ADAM_LRS = (3e-4, 1e-3, 3e-3, 1e-2)  # for ddp and co2


@dataclass(frozen=True)
class Quality(Asked):
    """What is tuned and trained."""

    rates: tuple[float, ...] = (50.0, 1000.0)
    """Mbit/s in quality."""
    seeds: tuple[int, ...] = (0, 1, 2)
    epoch_steps: int = 10
    """Steps between two evaluations in quality."""
    epochs: int = 30
    """Evaluations of methods without gradients; the others get a fifth as many steps."""

    def check(self) -> None:
        require(self, once="rates seeds", positive="rates", ones="epoch_steps epochs")
        if TUNING_SEED in self.seeds:
            raise UserError(f"seeds={TUNING_SEED}: it is the tuning seed; report other seeds")


def fine_tune(recipe: LanguageRecipe, wikitext: bool, log: Path) -> None:
    """One rank: the train script's own loop."""
    trainings.write_to(log)
    corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    if wikitext:
        tokens = open_wikitext2(corpus)
        cut = len(tokens) * 4 // 5
        corpus = replace(corpus, train=tokens[:cut], val=tokens[cut:])
    with Run(recipe) as run:
        train(run, recipe, corpus, make_objective(recipe, corpus), {"val": corpus.val[: recipe.eval_tokens]})


def recipes(o: Quality, base: Path) -> dict[str, tuple[int, LanguageRecipe]]:
    """Name -> workers, recipe."""
    common: dict[str, Any] = {"device": "cpu", "checkpoint_every": 0, "init_from": base, "timeout": 300.0}
    common |= {"epoch_steps": o.epoch_steps, "eval_every": 1, "eval_tokens": 1 << 14, "log_every": 5}
    zo = replace(gpt2_zo_small(), **common, epochs=o.epochs)
    fewer = max(1, o.epochs // 5)
    adam = replace(gpt2_pydoc_small(), **common, epochs=fewer, method="ddp", recommended=False)
    adam = replace(adam, optim=replace(adam.optim, warmup_steps=5))
    co2 = replace(adam, method="co2", recommended=True, co2=replace(adam.co2.recommended(4), tau=5))
    return {
        "MeZO, one process": (1, zo),
        "zo": (4, zo),
        "ddp, AdamW": (4, adam),
        "co2": (4, co2),
    }


def base_run(folder: Path, o: Quality) -> Path:
    """The run on Python's documentation whose model goes on; made where it is not there yet."""
    base = folder / "runs" / "base"
    if not base.exists():
        r = replace(gpt2_pydoc_small(), out=base, device="cpu", method="ddp", recommended=False, epochs=BASE_EPOCHS)
        with Cluster(2, FAST) as cluster:
            found = trainings.train(fine_tune, cluster, 2, base, r, False, timeout=1200)
        if "failed" in found:
            raise RuntimeError(f"{base}: {found['failed']}")
    return base


def measured(
    cluster: Cluster, folder: Path, name: str, workers: int, recipe: LanguageRecipe, seed: int, lr: float
) -> dict[str, Any]:
    """A run, which is written to the folder: its losses over time and at the end, or why it failed."""
    recipe = replace(recipe, out=folder, seed=seed, zeroth=replace(recipe.zeroth, seed=seed))
    recipe = replace(recipe, optim=replace(recipe.optim, lr=lr))
    row = {"method": name, "seed": seed, "lr": lr}
    found = trainings.train(fine_tune, cluster, workers, folder, recipe, True, timeout=900)
    if "failed" in found:
        return row | found
    summary = found["summary"]
    return row | {
        "losses": [(line["seconds"], line["val_loss"]) for line in found["rows"] if "val_loss" in line],
        "final": summary["val_loss"],
        "steps": summary["steps"],
        "steps_per_second": summary["steps_per_second"],
        "bytes_a_step": summary["bytes_sent"] / summary["steps"],
    }


def slug(*parts: object) -> str:
    return "-".join(str(part).replace(", ", "-").replace(" ", "-") for part in parts)


def measure_tuning(o: Quality, folder: Path) -> Iterator[dict[str, Any]]:
    """Every learning rate of the grids, on a seed and a link of its own, which no figure of `quality` has."""
    base = base_run(folder, o)
    with Cluster(4, FAST) as cluster:
        for name, (workers, recipe) in recipes(o, base).items():
            for lr in (LRS if recipe.method == "zo" else ADAM_LRS) if name not in TUNED_AS else ():
                out = folder / "runs" / slug("tuning", name, f"lr{lr:g}")
                yield measured(cluster, out, name, workers, recipe, TUNING_SEED, lr)


def tuned_lr(tuning: list[dict[str, Any]], name: str) -> float | None:
    return best_lr(tuning, TUNED_AS.get(name, name), "final")


def measure_quality(o: Quality, result: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    base = base_run(folder, o)
    with Cluster(4, FAST) as cluster:
        for seed in o.seeds:
            for rate in o.rates:
                cluster.shape(rate, result["verified_mbit"])
                for name, (workers, recipe) in recipes(o, base).items():
                    if workers == 1 and rate != o.rates[0]:
                        continue  # it has no link
                    lr = tuned_lr(result["tuning"], name)
                    row = {"rate_mbit": rate if workers > 1 else None}
                    if lr is None:
                        yield row | {"method": name, "seed": seed, "failed": "no learning rate of the grid trains it"}
                        continue
                    out = folder / "runs" / slug(name, f"{rate:g}mbit", f"seed{seed}")
                    yield row | measured(cluster, out, name, workers, recipe, seed, lr)


# -- the tables -------------------------------------------------------------------------------------------------


def tuning_text(rows: Sequence[dict[str, Any]]) -> str:
    """Each method's final loss at each learning rate, the least in bold, and a word where that is the grid's end."""
    lrs = sorted({row["lr"] for row in rows})
    cells = []
    for name in dict.fromkeys(row["method"] for row in rows):
        found = {row["lr"]: row.get("final", math.nan) for row in rows if row["method"] == name}
        best = min((lr for lr in found if math.isfinite(found[lr])), key=lambda lr: found[lr], default=None)
        shown = {lr: f"{loss:.4f}" if math.isfinite(loss) else "failed" for lr, loss in found.items()}
        if best is not None:
            shown[best] = f"**{shown[best]}**"
        ends = best in (min(found), max(found)) and len(found) > 1
        cells.append([name, *(shown.get(lr, "") for lr in lrs), "at the grid's end" if ends else ""])
    return report.table(("final loss at", *(f"{lr:g}" for lr in lrs), ""), cells) + (
        f"\n\nSeed {TUNING_SEED}, over links that do not slow. MeZO takes zo's, whose steps it takes."
    )


def quality_text(rows: Sequence[dict[str, Any]]) -> str:
    """The loss that the worst of MeZO's seeds ends with is what the others are timed to."""
    ended = [row for row in rows if "final" in row]
    mezo = [row["final"] for row in ended if row["rate_mbit"] is None]
    target = max(mezo) if mezo else None
    cells = []
    for key in dict.fromkeys((row["method"], row["rate_mbit"]) for row in rows):
        group = [row for row in ended if (row["method"], row["rate_mbit"]) == key]
        failed = [row["failed"] for row in rows if "failed" in row and (row["method"], row["rate_mbit"]) == key]
        if not group:
            cells.append([key[0], f"failed: {failed[0]}"])
            continue
        times = [seconds_to(row["losses"], target) for row in group] if target is not None else []
        reached = [t for t in times if t is not None]
        cells.append(
            [
                key[0],
                f"{key[1]:g}" if key[1] else "none",
                f"{group[0]['lr']:g}",
                group[0]["steps"],
                mean_sd([row["final"] for row in group], ".4f"),
                mean_sd([row["steps_per_second"] for row in group], ".2f"),
                f"{statistics.fmean(row['bytes_a_step'] for row in group):,.0f}",
                (mean_sd(reached, ".1f") if reached else "not reached") + f" ({len(reached)} of {len(times)})",
            ]
        )
    titles = ("method", "Mbit/s", "lr", "steps", "final loss", "steps/s", "bytes sent a step", "seconds to the target")
    told = "not known yet" if target is None else f"{target:.4f}"
    return report.table(titles, cells) + (
        f"\n\nThe target is {told}, where the worst of MeZO's seeds ended. Held-out nats per token. "
        "Four workers share this machine's cores, each on a node of its own."
    )


def seconds_to(losses: Sequence[Sequence[float]], target: float) -> float | None:
    return next((seconds for seconds, loss in losses if loss <= target), None)
