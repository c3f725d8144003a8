"""What a dry run says that a method holds, against the bytes of a method that trains: every tensor counted."""

import contextlib
import functools
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from core import CO2Config, CompressionConfig, LGrecoConfig, outer, shares
from core.baselines.ddp import GradientCompression
from core.baselines.local import SlowMoConfig
from core.baselines.table import make_method
from core.comm import AsyncAllReduce
from core.compression import quantized
from core.compression.lgreco import choices as decide
from core.compression.lgreco.choices import allocate, family, parse
from core.local_update import LocalUpdateMethod
from core.nodes import node_mesh
from core.testing import run_distributed
from language.zeroth import ZerothOrder
from tests.dispatch import Live
from training import checks
from training.recipe import Recipe

CO2 = CO2Config(tau=2)
SEGMENT = 1 << 13
TWICE = {"first": 1, "every": 1}


def fewer(errors: Tensor, sizes: Tensor, reference: list[int]) -> list[int]:
    """A decision that changes something: fewer bits for every layer."""
    return [family(parse("int4")).index(parse("int2"))] * len(reference)


def compressed(format: Any, like: str = "int4", **lgreco: Any) -> CO2Config:
    return replace(CO2, compression=CompressionConfig(format, like=like, lgreco=LGrecoConfig(**lgreco)))


RECOMMENDED = replace(CO2Config.recommended(), tau=2)
SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {"co2": CO2},
    "recommended": {"co2": RECOMMENDED},
    **{
        f"recommended, {f}": {"co2": replace(RECOMMENDED, compression=CompressionConfig(f))}
        for f in ("float32", "int8", "int4")
    },
    "keep_local": {"co2": replace(CO2, merge="keep_local", delay=1, gap="none")},
    "lgreco int4": {"co2": compressed("lgreco", **TWICE)},
    "lgreco top": {"co2": compressed("lgreco", "top0.01", **TWICE)},
    "lgreco rank": {"co2": compressed("lgreco", "rank4", **TWICE)},
    "local": {"method": "local"},
    **{f"{m} int4": {"method": m, "co2": compressed("int4", "")} for m in ("local", "slowmo", "overlap_local")},
    "local lgreco": {"method": "local", "co2": compressed("lgreco", **TWICE)},
    "slowmo": {"method": "slowmo", "slowmo": SlowMoConfig()},
    "overlap_local": {"method": "overlap_local"},
    "nesterov": {"co2": CO2Config(tau=2, nesterov=True)},
    "nesterov, no gap": {"co2": CO2Config(tau=2, nesterov=True, gap="none", outer_lr=0.4)},
    "diloco": {"method": "diloco"},
    "shard": {"co2": CO2Config(tau=2), "shard": True},
    "per_node": {"co2": CO2Config(tau=2), "per_node": 2},
    "int4, shard": {"co2": replace(RECOMMENDED, compression=CompressionConfig("int4")), "shard": True},
    "int4, per_node": {"co2": replace(RECOMMENDED, compression=CompressionConfig("int4")), "per_node": 2},
    "ddp int8": {"method": "ddp", "ddp_compression": CompressionConfig("int8")},
    "zo": {"method": "zo"},
}


def net() -> nn.Sequential:
    """200,000 parameters, beside which segments of SEGMENT elements are small."""
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(12)], nn.BatchNorm1d(128))


def recipe_of(name: str) -> Recipe:
    settings = {"co2": CO2Config(tau=2)} | SETTINGS[name]
    if settings.get("method") == "zo":
        recipe = Recipe(method="co2", co2=settings["co2"])
        object.__setattr__(recipe, "method", "zo")  # of language models
        return recipe
    return Recipe(**settings)


class Counted:
    """The tensors that a method makes: `staging`, the most that a reduction has beneath the local steps; `most`, the
    most that there was beyond what is there always."""

    def __init__(self, model: nn.Module):
        self.live = Live([*model.parameters(), *model.buffers()])
        self.staging, self.most, self.always = 0.0, 0.0, 0.0
        run_stages = AsyncAllReduce._run_stages

        def counted(background: AsyncAllReduce, *args: Any) -> None:
            with self.live:  # a mode is a thread's own
                self.live.peak = self.live.now
                run_stages(background, *args)
                self.staging = max(self.staging, self.live.peak - self.always)

        self.patch = mock.patch.object(AsyncAllReduce, "_run_stages", counted)

    def made(self) -> None:
        gc.collect()
        self.always = self.live.now

    def round_ended(self) -> None:
        self.most = max(self.most, self.live.peak - self.always)


@contextlib.contextmanager
def small_segments() -> Iterator[None]:
    """Encodes and updates little at once, as beside a large model; without the scratch memory of the CPU's own pass."""
    places = [(outer, "SEGMENT", SEGMENT), (quantized, "SEGMENT", SEGMENT)]
    places.append((shares, "FusedOuterStep", outer.OuterStep))
    with contextlib.ExitStack() as patches:
        for place in places:
            patches.enter_context(mock.patch.object(*place))
        yield


def uncounted(*args: Any, **kwargs: Any) -> Any:
    """L-GreCo's programme, whose table lies in the host's memory."""
    with _disable_current_modes():
        return allocate(*args, **kwargs)


def trains(name: str) -> tuple[float, float, float]:
    """Bytes of a method that is made and closes four rounds: always, in a reduction, and the most beyond always."""
    torch.manual_seed(0)
    recipe, model = recipe_of(name), net()
    counted = Counted(model)
    mesh = node_mesh("cpu", recipe.per_node) if recipe.per_node > 1 else None
    switches = name in ("lgreco int4", "local lgreco")  # what is said counts a switch, so one must come
    host = mock.patch.object(decide, "allocate", fewer if switches else uncounted)
    with counted.patch, host, small_segments(), counted.live, torch.no_grad():
        method = make(recipe, model, mesh)
        counted.made()
        for _ in range(4 if not isinstance(method, ZerothOrder) else 0):
            one_round(method, model)
            counted.round_ended()
    always = counted.always
    if isinstance(method, LocalUpdateMethod):
        method.finish()
    return always, counted.staging, counted.most


def make(recipe: Recipe, model: nn.Module, mesh: Any) -> Any:
    if recipe.method == "zo":
        return ZerothOrder(model[:-1], lr=0.1)
    if recipe.method == "ddp":
        return GradientCompression(model, recipe.ddp_compression, group=None, timeout=60.0, link=None)
    settings = {"co2": recipe.co2, "shard": recipe.shard, **recipe.own_settings}
    with mock.patch("core.baselines.table.DistributedDataParallel", lambda model, **_: model):
        return make_method(recipe.method, model, mesh=mesh, **settings)[1]


def one_round(method: Any, model: nn.Module) -> None:
    if isinstance(method, GradientCompression):
        (bucket,) = method.buckets
        bucket.payload.normal_()  # takes the place of DDP's own buffer, which is not the method's
        bucket.gradients, bucket.parameters = lambda: bucket.payload_views, lambda: bucket.params
        bucket.buffer, bucket.is_last = lambda: bucket.flat, lambda: True
        method.hook(None, bucket)
        return
    for _ in range(method.tau):
        for p in model.parameters():
            p.mul_(0.99)
        method.step()
    if method.allreduce.in_flight:
        method.allreduce.drain()


def on_worker(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    return {name: trains(name) for name in names}


@functools.cache
def counts(names: tuple[str, ...]) -> dict[str, Any]:
    """name -> what one of two workers holds."""
    return run_distributed(on_worker, 2, list(names), timeout=300)[0]


FAST = ("paper", "recommended", "int4, shard", "int4, per_node")
REST = tuple(name for name in SETTINGS if name not in FAST)


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_it_is_what_a_method_that_trains_holds(name: str):
    recipe = recipe_of(name)
    with torch.device("meta"):
        model = net()
    found = checks.held(recipe, model, recipe.per_node, 2)
    counted, staging, most = counts(FAST if name in FAST else REST)[name]
    flat = 4.0 * sum(p.numel() for p in model.parameters())
    told = [round(v / flat, 3) for v in (found, counted, staging, most)]
    assert found == pytest.approx(counted, rel=0.02, abs=0.02 * flat), told
    assert most <= 1.02 * max(staging, flat), told  # at a boundary one more
