"""Every public call of a Boundary, on every subclass that the project has.

The numbers are small multiples of powers of two, so that all arithmetic is exact: whatever order a pass takes, its
results are those of the formulas bit for bit.
"""

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core import flat as flats
from core import outer
from core.adaptive.config import MERGES
from core.adaptive.merging import MergeRule, MergingBoundary, keep, mix, with_merge
from core.outer import NOTHING_LANDED, Boundary, Rule
from tests.core.test_boundary import SHAPES, flat, make

ROOT = Path(__file__).parents[2]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@cache
def subclasses() -> list[Any]:
    """A parameter (module, name) for each class that derives from Boundary, found in the source: so also one whose
    imports are not installed here. But for Nesterov's, whose step 7 is another (tests/core/test_delayed.py)."""
    found: dict[str, tuple[Path, set[str]]] = {}
    for path in (path for room in ("core", "training", "bench") for path in (ROOT / room).rglob("*.py")):
        for name, bases in re.findall(r"^ *class (\w+)(?:\(([^)]*)\))?:", path.read_text(), re.MULTILINE):
            found[name] = path, set(re.findall(r"\w+", bases))
    names = {"Boundary"}
    del found["_NesterovBoundary"]
    while more := {name for name, (_, bases) in found.items() if bases & names} - names:
        names |= more
    return [_parameter(found[name][0], name) for name in sorted(names)]


def _parameter(path: Path, name: str) -> Any:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    marks = [pytest.mark.triton] if "import triton" in path.read_text() else []
    marks += [pytest.mark.slow] if name == "CompiledBoundary" else []
    return pytest.param(module, name, id=name, marks=marks)


def build(module: str, name: str, params: list[Any], state: list[Tensor], sent: Tensor | None) -> Boundary:
    kind = getattr(importlib.import_module(module), name)
    return kind(params, *state, sent) if issubclass(kind, MergingBoundary) else kind(params, *state)


def numbers(like: Tensor) -> Tensor:
    return (torch.randint(-16, 17, like.shape) / 8).to(like)


State = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # p, d, x, m, sent, each flat


def after_run(given: Rule) -> Callable[..., State]:
    rule = with_merge(given)

    def expected(p: Tensor, d: Tensor, x: Tensor, m: Tensor, sent: Tensor) -> State:
        new = outer.clip_elements(outer.momentum(m, rule.scale * d, rule.beta, rule.gap), rule.phi or 1e9)
        next_x, wide = outer.outer_step(x, new, rule.alpha), p.to(x.dtype)
        merged = {"outer": next_x, "mix": mix(next_x, wide, rule.share), "keep": keep(next_x, wide, sent)}
        next_d = x.to(p.dtype).to(x.dtype) - p if rule.sends else d
        return merged[rule.merge].to(p.dtype), next_d, next_x, new, sent

    return expected


def after_take(p: Tensor, d: Tensor, x: Tensor, m: Tensor, sent: Tensor) -> State:
    return p, x.to(p.dtype).to(x.dtype) - p, x, m, p.to(x.dtype)


def after_restart(where: bool | None) -> Callable[..., State]:
    def expected(p: Tensor, d: Tensor, x: Tensor, m: Tensor, sent: Tensor) -> State:
        start = p if where is False else x.to(p.dtype)
        return start, d, x, m, start.to(x.dtype) if where else sent

    return expected


def calls(device: str) -> dict[str, tuple[Callable[[Any], Any], Callable[..., State]]]:
    """Name -> (the call, what the state becomes)."""
    landed = MergeRule(0.5, 0.5, 1.0, 1.0, 0.25, gap=torch.tensor(2.0, device=device), share=0.25)
    rules = {
        f"run {merge}, sends {s}": replace(landed, merge=merge, sends=s) for merge in MERGES for s in (True, False)
    }
    rules |= {"run nothing landed": NOTHING_LANDED, "run unclipped": replace(landed, phi=None, gap=None)}
    known: dict[str, Any] = {name: (lambda b, rule=rule: b.run(rule), after_run(rule)) for name, rule in rules.items()}
    for where in (True, False):
        truth = torch.tensor(where, device=device)
        known[f"restart {where}"] = (lambda b, truth=truth: b.restart(truth), after_restart(where))
    return known | {"restart": (lambda b: b.restart(), after_restart(None)), "take": (lambda b: b.take(), after_take)}


PAPERS = ("run outer, sends True", "run nothing landed", "run unclipped")  # all that a Boundary of the root knows


def move(params: list[Any]) -> None:
    """To other storage, the strided ones to other strides."""
    for p in params:
        p.data = torch.empty_like(p, memory_format=torch.contiguous_format if p.dim() > 1 else torch.preserve_format)


def check_calls(module: str, name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    for call, (act, expected) in calls(device).items():
        params, *state = make(dtype, SHAPES, device)
        state += [torch.empty_like(state[0])]
        tested = build(module, name, params, state[:3], state[3])
        if call not in PAPERS and not isinstance(tested, MergingBoundary):
            continue
        for moved in (False, True):
            if moved:
                move(params)
            for t in [*(p.data for p in params), *state]:
                t.copy_(numbers(t.cpu()))
            want = expected(*(t.clone() for t in (flat(params), *state)))
            act(tested)
            for what, got, value in zip(("p", "d", "x", "m", "sent"), (flat(params), *state), want, strict=True):
                assert torch.equal(got, value), f"{call}{', moved' * moved}: {what}"


@pytest.mark.parametrize("free", [True, False], ids=["host reads", "host never reads"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("module", "name"), subclasses())
def test_every_call_of_every_subclass(module: str, name: str, dtype: torch.dtype, free: bool, monkeypatch: Any):
    monkeypatch.setattr(flats, "read_blocks", lambda t: not free)
    check_calls(module, name, dtype)


WITHOUT_TAKE = ("Boundary", "ChunkedBoundary", "CompiledBoundary")  # of the paper's merge alone


@pytest.mark.parametrize(("module", "name"), [p for p in subclasses() if p.id not in WITHOUT_TAKE])
def test_without_sent(module: str, name: str):
    params, d, x, m = make(torch.float32, SHAPES)
    tested = build(module, name, params, [d, x, m], None)
    before = flat(params)
    tested.take()
    assert torch.equal(d, x - before)
    tested.restart(torch.tensor(True))
    assert torch.equal(flat(params), x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["MergingBoundary", "TritonBoundary"])
def test_every_call_on_the_device(name: str, dtype: torch.dtype):
    modules = {"MergingBoundary": "core.adaptive.merging", "TritonBoundary": "core.triton.boundary"}
    check_calls(modules[name], name, dtype, "cuda")
