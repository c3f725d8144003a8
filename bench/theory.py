"""Holds docs/theory.md against the algorithm as specified: python -m bench.theory [--parts regions rate] [--out FOLDER]

Predictions, by bench/quadratic.py and the page's theorems, beside what bench.search's stacked engine does, which runs
core/testing/reference.py through bench/reference.py. Writes theory.json, theory.md; status 1 where one does not hold.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import report
from bench.quadratic import Array, Quadratic, jury, largest, late_with_momentum, spread_with_momentum
from bench.report import mean_sd, read_options, require
from bench.search.methods import CO2, Outer
from bench.search.rows import Rows
from bench.search.task import Inner
from core import CO2Config
from core.errors import UserError
from training.script import launch

NAME = "theory"
ROWS = Path(__file__).parents[1] / "results" / "staleness.jsonl"  # bench.search's, for the part text
QS = (-0.95, -0.8, -0.6, -0.3, 1e-3, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
ALPHAS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0, 1.3, 1.7, 2.0, 2.5)
BETAS, TAUS = (0.0, 0.2, 0.5, 0.6, 0.8), (5, 6)


@dataclass(frozen=True)
class Theory:
    """What is checked, and how long."""

    parts: tuple[str, ...] = ("regions", "limits", "momentum", "apart", "staleness", "rate", "text")
    """Among these; each is a section of the tables."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the rate."""
    replicas: int = 2500
    """Of a noisy quadratic, trained side by side."""
    steps: int = 16000
    """Of the longest run of the rate."""
    out: Path = Path("results")
    """Where to write, over what is there."""

    def check(self) -> None:
        require(self, once="parts seeds", ones="replicas", parts=PARTS)
        if self.steps < 1600:
            raise UserError(f"steps={self.steps}: the shortest run takes a sixteenth of them; give 1600 or more")


@dataclass(frozen=True)
class Part:
    """What came of one: a table, and what was to hold."""

    title: str
    titles: str
    """Divided by |."""
    rows: list[list[str]]
    holds: dict[str, bool]
    note: str = ""


# -- the engine -------------------------------------------------------------------------------------------------


class Watched(Outer):
    """bench.search's CO2 without penalty or clipping, that calls `seen` when the workers send. options: as there, the
    numbers also one for each column, [n]. x: [workers, n]."""

    seen: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, x: Tensor, merge: str, tau: int, delay: int, **options: Any):
        usual = CO2 | {"alpha": 1.0, "beta": 0.0, "gap": "none", "phi": None, "merge": merge, "delay": delay}
        super().__init__(x, tau, **usual | options)
        self.outer = self.parts[0]

    def local_step(self) -> None:
        if self.taken % self.tau == 0:
            self.seen()
        super().local_step()

    def train(self, gradient: Callable[[Tensor], Tensor], steps: int, momentum: float = 0.0) -> None:
        """By SGD of learning rate 1."""
        inner = Inner("sgd", 1.0, momentum).start(self.x)
        for _ in range(steps):
            self.train_step(lambda x, _: gradient(x), (), inner, 1.0)

    def apart(self) -> Tensor:
        """What the workers send about its mean, [workers, n]: with merge keep their own progress."""
        sent = self.x - self.outer.base if self.outer.merge == "keep" else self.x
        return sent - sent.mean(0)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def growth(start: Tensor, q: Array, momentum: float = 0.0, rounds: int = 240, **options: Any) -> Array:
    """By what the error is multiplied in a round, in the end, [n], of workers that begin at `start`, [workers, n]: the
    mean's where one worker trains; the differences' where two begin opposite, for then the mean stays 0."""
    m, h, sizes = Watched(start.clone(), **options), tensor(1 - q), list[Tensor]()
    m.outer.z = start.mean(0)
    m.seen = lambda: sizes.append(torch.stack([m.x[0].abs(), m.outer.z.abs(), m.outer.m.abs()]).amax(0))
    m.train(lambda x: h * x, rounds * m.tau, momentum)
    late, early = (torch.stack(sizes[end - 20 : end]).amax(0).numpy() for end in (rounds, rounds // 2))
    told = (late > 1e-250) & (early > 1e-250)
    return np.where(told, late / np.where(told, early, 1.0), 0.0) ** (2 / rounds)


def variances(o: Theory, q: float, workers: int = 4, **options: Any) -> tuple[float, float]:
    """Of the outer iterate, and of what the workers send about its mean, under noise of variance 1, in the end."""
    generator, found = torch.Generator().manual_seed(7), list[tuple[float, float]]()
    m = Watched(torch.zeros(workers, o.replicas, dtype=torch.float64), **options)
    m.seen = lambda: found.append((float(m.outer.z.square().mean()), float(m.apart().square().mean())))
    m.train(lambda x: (1 - q) * x + torch.randn(x.shape, generator=generator, dtype=x.dtype), 160 * m.tau)
    outer, apart = np.mean(found[60:], 0)
    return float(outer), float(apart)


# -- the parts --------------------------------------------------------------------------------------------------


def regions(o: Theory) -> Part:
    """Whether a setting settles: by the polynomials and by training."""
    rows, elsewhere, total, same = [], 0, 0, 0
    for merge, whole in itertools.product(("outer", "mix", "keep"), (True, False)):
        shares, count, alike, stable = (0.25, 0.5, 0.75) if merge == "mix" else (1.0,), 0, 0, 0
        q, alpha, share = (v.reshape(-1) for v in np.meshgrid(QS, ALPHAS, shares, indexing="ij"))
        for tau, beta in itertools.product(TAUS, BETAS):
            for delay in (tau,) if whole else (0, 1, 3):
                told = {"alpha": tensor(alpha), "beta": beta, "kappa": tensor(share)}
                seen = growth(torch.ones(1, len(q)).double(), q, merge=merge, tau=tau, delay=delay, **told) < 1
                found = [Quadratic(merge, a, tau, delay, k, beta, s) for a, k, s in zip(q, alpha, share, strict=True)]
                wanted = np.array([jury(one.polynomial()) for one in found])
                near = np.array([abs(one.radius - 1) < 0.01 for one in found])
                count, alike, stable = count + len(q), alike + int((seen == wanted).sum()), stable + int(wanted.sum())
                elsewhere += int(((seen != wanted) & ~near).sum())
        total, same = total + count, same + alike
        when = "a whole round late" if whole else "0, 1 and 3 steps after sending"
        rows.append([merge, when, str(count), f"{alike / count:.2%}", f"{stable / count:.0%}"])
    holds = {f"{same} of {total} as predicted; farther than 1 % from a limit {elsewhere} of the others": not elsewhere}
    return Part("Which settings settle", "merge | merged | settings | as predicted | settle", rows, holds)


def accepted(merge: str, tau: int, delay: int, alpha: float, beta: float) -> bool:
    """Whether the package trains with it."""
    late: Any = "boundary" if delay == tau else delay
    try:
        CO2Config(tau, merge=merge, delay=late, outer_lr=alpha, outer_momentum=beta, gap="none").check_stable()  # pyright: ignore
    except UserError:
        return False
    return True


def limits(o: Theory) -> Part:
    """The largest outer learning rate, and that the package refuses just what is above it."""
    rows, refused = [], True
    for merge, delay in (("outer", 12), ("mix", 12), ("mix", 3), ("outer", 0), ("keep", 12), ("keep", 9), ("keep", 3)):
        found = [largest(merge, 12, delay, beta) for beta in (0.0, 0.3, 0.6)]
        for beta, one in zip((0.0, 0.3, 0.6), found, strict=True):
            refused &= [accepted(merge, 12, delay, one * by, beta) for by in (0.998, 1.002)] == [True, False]
        rows.append([merge, f"{delay} of 12", *(f"{one:.3f}" for one in found)])
    holds = {"the package accepts 0.2 % below each limit and refuses 0.2 % above it": refused}
    cases = (("outer", 5, -(0.5**0.2), 0.7, 0.2), ("keep", 5, 1e-3, 1.0, 0.8), ("mix", 1, 1e-3, 5.0, 0.2))
    for merge, delay, q, alpha, beta in cases:
        one = Quadratic(merge, q, 5, delay, alpha, beta)
        seen = growth(torch.ones(1, 1).double(), np.array([q]), merge=merge, tau=5, delay=delay, alpha=alpha, beta=beta)
        told = "accepted" if accepted(merge, 5, delay, alpha, beta) else "refused"
        text = f"{merge}, delay {delay} of 5, outer_lr {alpha}, beta {beta}, rho {1 - q**5:.3g} ({told}): error times "
        holds[f"{text}{seen[0]:.3f} a round, predicted {one.radius:.3f}"] = abs(seen[0] - one.radius) < 0.01
    titles = "merge | merged after | beta 0 | beta 0.3 | beta 0.6"
    return Part("Largest outer learning rate for every rho up to 1", titles, rows, holds)


def momentum(o: Theory) -> Part:
    """Inside momentum of 0.9 overshoots, which no outer setting sees."""
    lh, rows, holds = np.geomspace(1e-3, 1.0, 750), [], {}
    for tau in (6, 12, 24, 48):
        factors = [spread_with_momentum(0.9, lh, tau, delay).max() for delay in range(tau + 1)]
        first = next(delay for delay, factor in enumerate(factors) if factor >= 1)
        late = late_with_momentum(0.9, lh, tau, 0.7, 0.2).max()
        rows.append([str(tau), str(first), f"{factors[-1]:.2f}", f"{late:.2f}"])
    for tau, delay in ((12, 1), (12, 4), (24, 9), (24, 24)):
        factors = spread_with_momentum(0.9, lh, tau, delay)
        worst, factor = lh[factors.argmax()], factors.max()
        opposite = tensor([[1.0], [-1.0]])  # two workers
        seen = growth(opposite, np.array([1 - worst]), 0.9, merge="keep", tau=tau, delay=delay)[0]
        text = f"keep, tau {tau}, delay {delay}, lr h {worst:.3f}: differences times {seen:.3f} a round"
        holds[f"{text}, predicted {factor:.3f}"] = bool(abs(seen - factor) < 0.02)
    titles = "tau | keep: least delay at which differences grow | at a whole round, times | outer, times"
    return Part("SGD with momentum 0.9 inside, lr h from 0.001 to 1", titles, rows, holds)


def apart(o: Theory) -> Part:
    """How far apart the workers are."""
    rows, worst = [], 0.0
    kept = ((0, 0.9), (2, 0.9), (4, 0.8), (6, 0.8), (8, 0.9), (8, 0.7))
    for merge, delay, q in (*(("keep", *one) for one in kept), ("outer", 8, 0.9)):
        alpha = 0.5 if merge == "outer" else 1.0
        one = Quadratic(merge, q, 8, delay, alpha)
        _, seen = variances(o, q, merge=merge, tau=8, delay=delay, alpha=alpha)
        worst = max(worst, abs(seen / one.apart(4) - 1))
        rows.append([merge, f"{delay} of 8", f"{q}", f"{one.spread:+.3f}", f"{one.apart(4):.3f}", f"{seen:.3f}"])
    titles = "merge | merged after | q | a round's factor | mean square apart, predicted | seen"
    return Part("How far the workers are apart", titles, rows, {f"within 2 % (worst {worst:.1%})": worst < 0.02})


def staleness(o: Theory) -> Part:
    """What a late mean costs on a noisy quadratic: its excess loss is h / 2 times the outer iterate's variance."""
    rows, worst, tau = [], 0.0, 12
    for merge, beta in (("outer", 0.0), ("outer", 0.2), ("keep", 0.0), ("keep", 0.2), ("keep", 0.5)):
        alpha = 0.5 if merge == "outer" else 1.0
        for q in (0.98, 0.9, 0.7):
            cells, blocking = [], 0.0
            for delay in (0, 1, 3, 6, 12):
                if merge == "outer" and 0 < delay < tau:
                    cells.append("")
                    continue
                predicted = Quadratic(merge, q, tau, delay, alpha, beta).variance(4)
                seen, _ = variances(o, q, merge=merge, tau=tau, delay=delay, alpha=alpha, beta=beta)
                blocking, worst = blocking or predicted, max(worst, abs(seen / predicted - 1))
                cells.append(f"{predicted / blocking:.3f} ({seen / blocking:.3f})")
            rows.append([f"{merge}, outer_lr {alpha}, beta {beta}", f"{q}", *cells])
    titles = "setting | q | " + " | ".join(f"after {delay} of {tau}" for delay in (0, 1, 3, 6, 12))
    title = "Excess loss over that of blocking means: predicted (seen)"
    return Part(title, titles, rows, {f"variances within 2 % (worst {worst:.1%})": worst < 0.02})


SLOPE, BUMP, PERIOD, SIZE = 0.2, 0.4, 2.0, 20  # f(x) = sum_j SLOPE x_j^2 / 2 + BUMP (1 - cos(PERIOD x_j)), x in R^SIZE
SMOOTH = SLOPE + BUMP * PERIOD**2  # L
REPLICAS, TAU = 8, 8


def descend(o: Theory, workers: int, steps: int, merge: str, delay: int) -> tuple[Array, float, float]:
    """The mean over the steps of |grad f(mean of the workers)|^2, [seeds * REPLICAS]; its share of theorem 1's bound,
    nan where that is not due; and the workers' mean square distance from their mean over that without curvature."""
    many, lr = len(o.seeds) * REPLICAS * SIZE, 0.39 * (workers / steps) ** 0.5
    draws = [torch.Generator().manual_seed(10**6 * seed + 1000 * workers + steps) for seed in o.seeds]
    drawn = lambda n: torch.cat([torch.randn(n, many // len(draws), generator=g).double() for g in draws], 1)  # noqa: E731
    of = lambda x: SLOPE * x + BUMP * PERIOD * torch.sin(PERIOD * x)  # noqa: E731
    start = 1.5 * drawn(1)
    m, total = Watched(start.repeat(workers, 1), merge, TAU, delay), torch.zeros(2, many).double()

    def gradient(x: Tensor) -> Tensor:
        total[0] += of(x.mean(0)).square()
        total[1] += x.var(0, correction=0)
        return lr * (of(x) + drawn(workers))

    m.train(gradient, steps)
    square, apart = total[0].view(-1, SIZE).sum(1) / steps, float(total[1].mean()) / steps
    first = float((SLOPE * start**2 / 2 + BUMP * (1 - torch.cos(PERIOD * start))).sum()) / (many / SIZE)
    window, free = TAU + delay, lr**2 * (1 - 1 / workers) * ((delay if merge == "keep" else 0) + (TAU - 1) / 2)
    bound = 2 * first / (lr * steps) + lr * SMOOTH * SIZE / workers + 4 * (lr * SMOOTH) ** 2 * window * SIZE
    due = merge == "keep" and lr * SMOOTH * window <= 8**-0.5
    return square.numpy(), float(square.mean()) / bound if due else math.nan, apart / free if free else math.nan


def slopes(xs: Sequence[int], ys: list[Array], seeds: int) -> tuple[str, float]:
    """Of log y against log x by replica: `mean ± two standard errors (each seed's)`, and its distance from -1/2."""
    each = np.polyfit(np.log(xs), np.log(np.stack(ys)), 1)[0]
    twice = 2 * each.std(ddof=1) / len(each) ** 0.5
    of_seeds = ", ".join(f"{one.mean():.3f}" for one in each.reshape(seeds, -1))
    return f"{each.mean():.3f} ± {twice:.3f} ({of_seeds})", float(each.mean()) + 0.5


def rate(o: Theory) -> Part:
    """|grad f|^2 against workers G and steps T, with learning rate 0.39 sqrt(G / T): both slopes should be -1/2."""
    counts, lengths = (1, 2, 4, 8, 16), [o.steps // part for part in (16, 8, 4, 2, 1)]
    rows, holds = [], {}
    for merge, delay in (("keep", 0), ("keep", 2), ("keep", 8), ("outer", 8)):
        pairs = [(g, lengths[3]) for g in counts] + [(4, t) for t in lengths]
        runs = {pair: descend(o, *pair, merge, delay) for pair in dict.fromkeys(pairs)}
        in_g, one = slopes(counts, [runs[pair][0] for pair in pairs[:5]], len(o.seeds))
        in_t, two = slopes(lengths, [runs[pair][0] for pair in pairs[5:]], len(o.seeds))
        shares, apart = ([run[i] for run in runs.values() if not math.isnan(run[i])] for i in (1, 2))
        of_bound = f"{min(shares):.2f} to {max(shares):.2f} in {len(shares)} of {len(runs)}" if shares else ""
        rows.append([merge, f"{delay} of {TAU}", in_g, in_t, of_bound, f"{min(apart):.2f} to {max(apart):.2f}"])
        below = max(shares, default=0.0) < 1
        holds[f"{merge}, {delay}: slopes within 0.1 of -1/2, below the bound"] = below and max(abs(one), abs(two)) < 0.1
    titles = "merge | merged after | slope in G (each seed's) | slope in T (each seed's)"
    titles += " | share of theorem 1's bound | mean square apart over that without curvature"
    return Part("Rate on a function with many valleys", titles, rows, holds)


def text(o: Theory) -> Part:
    """What the delay costs in training, from rows of bench.search; against local on the same seeds."""
    losses: dict[tuple[str, float, int, int], dict[int, float]] = {}
    known = Rows(ROWS).runs.values()
    for row in known:
        delay = 0 if row["method"] == "local" else row["options"]["delay"]
        where = row["task"], row["lr"], row["tau"], row["tau"] if delay == "round" else delay
        losses.setdefault(where, {})[row["seed"]] = math.inf if row["loss"] is None else row["loss"]
    rows = []
    for (task, lr, tau, delay), found in sorted(losses.items()):
        local = losses[task, lr, tau, 0]
        over = statistics.fmean(found.values()) / statistics.fmean(local[seed] for seed in found) - 1
        window = delay / ((tau - 1) / 2)  # beyond local's
        a_window, seeds = f"{over / window:+.1%}" if window else "", " ".join(map(str, sorted(found)))
        loss = mean_sd(list(found.values()), ".4f")
        rows.append([task, f"{lr:g}", f"{tau}", f"{delay}", loss, seeds, f"{over:+.1%}", f"{window:.2f}", a_window])
    titles = "task | lr | tau | delay | loss | seeds | over local's | windows beyond local's | a window costs"
    commits = ", ".join(sorted({row["commit"] for row in known}))
    note = (
        "Rows of `bench.search`, which this command does not train: `python -m bench.search --tasks digits bytes "
        "--tau TAU --lr_factors FACTOR --methods local co2:merge=keep,gap=none,beta=0,delay=DELAY --rows "
        "results/staleness.jsonl` ([all](staleness.md)). digits: the perceptron of bench.peers, 0.28 M parameters, "
        f"on scikit-learn's digits; bytes: a GPT of 0.07 M on the Gutenberg books. Not tuned. Commits: {commits}."
    )
    return Part("keep in training, beta 0, 4 workers, 480 steps", titles, rows, {}, note)


PARTS = {part.__name__: part for part in (regions, limits, momentum, apart, staleness, rate, text)}


def take(o: Theory, name: str) -> Part:
    torch.set_num_threads(1)
    with torch.no_grad():
        return PARTS[name](o)


def page(parts: Sequence[Part]) -> str:
    """The tables, and below each what was to hold."""

    def told(part: Part) -> list[str]:
        held = [f"{claim}: {'holds' if ok else 'DOES NOT HOLD'}" for claim, ok in part.holds.items()]
        return held + [part.note] * bool(part.note)

    return "\n".join(
        f"## {p.title}\n\n{report.table(p.titles.split(' | '), p.rows)}\n\n{report.bullets(told(p))}\n" for p in parts
    )


def main() -> None:
    o = read_options(Theory, "bench.theory", description=__doc__)
    o.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2, get_context("spawn")) as workers:
        parts = list(workers.map(take, [o] * len(o.parts), o.parts))
    result = report.header("bench.theory", o, ("torch", "numpy")) | {"rows": [asdict(part) for part in parts]}
    report.conclude(o.out, NAME, result, f"# Theory, checked\n\n- {report.source(result)}\n\n{page(parts)}")
    if failed := [claim for part in parts for claim, ok in part.holds.items() if not ok]:
        sys.exit(f"{len(failed)} did not hold: {'; '.join(failed)}")


if __name__ == "__main__":
    launch(main)
