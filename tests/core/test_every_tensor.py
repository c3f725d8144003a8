"""Tensors of every dtype and layout, in every place of a model, under many optimizers: averaged, or equal."""

import atexit
import contextlib
import gc
import io
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from core import CO2, CO2Config, UserError
from core.baselines import LocalSGD
from core.buckets import kind_of, parts_of
from core.testing import run_distributed
from tests.on_ranks import on_ranks
from tests.problems import refusal

NAMES = """bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex32 complex64
complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"""
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]


def bits_of(dtype: torch.dtype, seed: int) -> Tensor:
    """[4, 4] of that dtype, each element 0 or 1 as far as it has both."""
    values = torch.randint(0, 2, (4, 4), generator=torch.Generator().manual_seed(seed))
    if dtype.itemsize == 1 and dtype not in (torch.bool, torch.uint8, torch.int8):
        return (values.to(torch.uint8) * 8 + 40).view(dtype)  # finite in every float8
    return values.to(dtype)


KEPT: dict[str, Callable[[int], Tensor]] = {str(d)[6:]: lambda seed, d=d: bits_of(d, seed) for d in DTYPES}
KEPT |= {
    "transposed": lambda seed: bits_of(torch.int16, seed).t(),
    "expanded": lambda seed: bits_of(torch.int64, seed)[:1].expand(4, 4),
    "empty": lambda seed: torch.empty(0, 3, dtype=torch.int16),
    "scalar": lambda seed: torch.tensor(seed, dtype=torch.int16),
    "sparse": lambda seed: (torch.eye(4) * (seed + 1)).to_sparse(),
    "csr": lambda seed: (torch.eye(4) * (seed + 1)).to_sparse_csr(),
    "csc": lambda seed: (torch.eye(4) * (seed + 1)).to_sparse_csc(),
    "bsr": lambda seed: (torch.eye(4) * (seed + 1)).to_sparse_bsr((2, 2)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {  # eps: in float16 the usual 1e-8 is 0
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3),
    "foreach": lambda p: torch.optim.Adam(p, 0.01, eps=1e-3, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, 0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01, eps=1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
}
WRAPPERS = ("plain", "ddp of one", "weight norm", "tied", "channels last")
PARAMS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype, wrapper: str):
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=dtype)
        self.norm = nn.BatchNorm1d(4, dtype=dtype)
        self.second = nn.Linear(4, 4, dtype=dtype)
        if wrapper == "weight norm":
            parametrizations.weight_norm(self.first)
        if wrapper == "tied":
            self.second.weight = self.first.weight
        if wrapper == "channels last":
            self.second.weight = nn.Parameter(self.second.weight.detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))


Cell = tuple[tuple[str, ...], str, str, str]


def cells() -> Iterator[Cell]:
    """(what is kept, or the parameters' dtype; where, or the wrapper; optimizer; method): each pair of the latter three
    in some cell, and all that is kept in one model."""
    for where, method in itertools.product(("buffer", "frozen"), ("co2", "local")):
        yield (*KEPT,), where, "SGD", method
    for (i, wrapper), (j, optimizer) in itertools.product(enumerate(WRAPPERS), enumerate(OPTIMIZERS)):
        yield (str(PARAMS[(i + j) % len(PARAMS)])[6:],), wrapper, optimizer, "local"


def numbers(net: nn.Module) -> list[Tensor]:
    found = [*net.parameters(), *net.buffers()]
    return [part.contiguous().view(-1).view(torch.uint8) for t in found for part in parts_of(t) if part.numel()]


def cell(rank: int, kept: tuple[str, ...], where: str, optimizer_name: str, method_name: str) -> str:
    """What is wrong with it; "" if all is well."""
    torch.manual_seed(rank)
    dtype = torch.float32 if where in ("buffer", "frozen") else getattr(torch, kept[0])
    net = Net(dtype, where)
    for name in kept:
        if where == "buffer":
            net.register_buffer(f"kept_{name}", KEPT[name](rank))
        if where == "frozen":
            setattr(net, f"kept_{name}", nn.Parameter(KEPT[name](rank), requires_grad=False))
    params, more = net.parameters(), {"buffers": net.buffers(), "group": PAIR[0]}
    method = CO2(params, CO2Config.paper(tau=2), **more) if method_name == "co2" else LocalSGD(params, 2, **more)
    optimizer = OPTIMIZERS[optimizer_name](p for p in net.parameters() if p.requires_grad)
    loop = DistributedDataParallel(net, process_group=PAIR[1]) if where == "ddp of one" else net
    before: list[Tensor] = []
    for number in range(4):
        loop(torch.randn(8, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 3:  # LocalSGD's mean of these follows
            before = [t.detach().clone() for t in (*net.parameters(), *net.buffers()) if t.dtype == dtype]
        method.step()
    method.finish()
    method.close()
    problems = []
    for mine in numbers(net):
        theirs = mine.clone()
        dist.broadcast(theirs, 0, group=PAIR[0])
        problems += [] if torch.equal(mine, theirs) else ["workers differ"]
    for name in kept if where in ("buffer", "frozen") else ():
        first, here = KEPT[name](0), getattr(net, f"kept_{name}")
        problems += [] if kind_of(first) == kind_of(here) else [f"{name} of another kind"]
        for a, b in zip(parts_of(first), parts_of(here), strict=True):
            same = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b) if t.numel()]
            problems += [] if not same or torch.equal(*same) else [f"{name} not as the first worker has it"]
    if where not in ("buffer", "frozen"):
        after = [t.detach() for t in (*net.parameters(), *net.buffers()) if t.dtype == dtype]
        for was, now in zip(before, after, strict=True):
            mean = was.double()
            dist.all_reduce(mean, group=PAIR[0])
            tolerance = torch.finfo(dtype).eps if dtype == torch.float64 else max(1e-6, torch.finfo(dtype).eps)
            problems += [] if torch.allclose(now.double(), mean / 2, rtol=2 * tolerance, atol=1e-7) else ["no mean"]
    return ", ".join(dict.fromkeys(problems))


PAIR: list[Any] = []  # the group of two workers, and that of this one alone


@on_ranks(3, timeout=240)
def test_a_table_of_dtypes_containers_optimizers_and_wrappers(rank: int):
    """Two ranks of three: a method leaves the group of some ranks to the next method, so that none is made anew."""
    alone, pair = [dist.new_group([r]) for r in range(3)][rank], dist.new_group([0, 1])
    PAIR[:] = [pair, alone]
    of_all = [*cells()] if rank < 2 else []
    found = [f"{of}: {problem}" for of in of_all if (problem := cell(rank, *of))]
    assert not found and (len(of_all) >= 34 or rank == 2), found[:20]


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: nn.LazyLinear(3).weight, "of a lazy module, and has no shape yet: pass one batch"),
        (lambda: nn.UninitializedBuffer(), "of a lazy module, and has no shape yet: pass one batch"),
        (lambda: torch.empty(3, device="meta"), "is on the meta device and has no numbers: call model.to_empty"),
        (lambda: nn.Parameter(torch.empty(3, device="meta")), "is on the meta device"),
    ],
)
def test_lazy_and_meta_tensors_are_one_line(make: Callable[[], Tensor], text: str):
    for given in ({"params": [make()]}, {"params": nn.Linear(1, 1).parameters(), "buffers": [make()]}):
        with pytest.raises(UserError, match=text) as caught:
            CO2(given["params"], CO2Config(tau=2), buffers=given.get("buffers", ()))
        assert "\n" not in str(caught.value)


def test_a_quantized_tensor_is_one_line():
    given = torch.quantize_per_tensor(torch.eye(4), 0.1, 3, torch.qint8)
    assert "type torch.qint8 cannot be sent to the other workers" in refusal(parts_of, given)


@pytest.mark.parametrize("make", [lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3).to_sparse_csr()])
def test_a_sparse_parameter_cannot_be_trained(make: Callable[[], Tensor]):
    with pytest.raises(UserError, match="of layout torch.sparse.*: only dense ones can be averaged"):
        CO2([nn.Parameter(make())], CO2Config(tau=2))


@on_ranks(2)
def test_complex_buffers_become_their_mean(rank: int):
    net = nn.Linear(2, 1)
    net.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))
    method = LocalSGD(net.parameters(), 1, buffers=net.buffers())
    net.turn.fill_(complex(rank, 2 * rank))
    method.step()
    method.finish()
    assert net.turn.tolist() == [0.5 + 1j] * 2


# -- a script that ends without finish() ------------------------------------------------------------------------------


def main(kind: str) -> Any:
    net = nn.Linear(2, 1)
    made = LocalSGD(net.parameters(), 2) if "local" in kind else CO2(net.parameters(), CO2Config(tau=2))
    for _ in range(4 if "even" in kind else 5):
        made.step()
    if "raises" in kind:
        raise RuntimeError("of its own")
    if "finished" in kind:
        made.finish()
    if "saved" in kind:
        made.state_dict()
    if "destroyed" in kind:
        dist.destroy_process_group()
    return made if "kept" in kind else None


def ends(rank: int, world_size: int, kind: str) -> list[str]:
    """The warnings at the end of a script, with the functions that Python calls there."""
    with contextlib.redirect_stderr(io.StringIO()) as said, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hides no such warning
        try:
            kept = main(kind)  # noqa: F841
        except RuntimeError as error:
            sys.last_type = type(error)  # as where nobody catches it
        if "collected" in kind:
            gc.collect()
        atexit._run_exitfuncs()
    return [line for line in said.getvalue().splitlines() if line.startswith("warning: the script ends without")]


KINDS = ("kept", 1), ("collected", 1), ("kept destroyed", 1), ("local", 1), ("local even", 0)
KINDS = *KINDS, ("raises", 0), ("finished", 0), ("saved", 0)


@pytest.mark.parametrize(("kind", "warns"), KINDS)
def test_a_script_that_ends_without_finish_is_told_so_once(kind: str, warns: int):
    of_both = run_distributed(ends, 2, kind, expect_death=(0, 1))  # no barrier behind it: the group may be gone
    assert sum(map(len, of_both)) == warns, of_both


SCRIPT = """
import sys, torch.distributed as dist
from tests.core.test_every_tensor import main
rank, kind, file = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
kept = main(kind)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "warns"), [("kept", 1), ("kept destroyed", 1), ("raises", 0)])
def test_a_real_script_that_ends_without_finish_is_told_so_once(kind: str, warns: int, tmp_path: Path):
    run = [sys.executable, "-c", SCRIPT]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([*run, str(r), kind, str(tmp_path / "rendezvous")], env=env, stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    told = "".join(p.communicate(timeout=120)[1] for p in both)
    assert told.count("warning: the script ends without") == warns, told
    assert [p.returncode for p in both] == [int(kind == "raises")] * 2, "a warning leaves the status as it is"
    assert told.count("RuntimeError: of its own") == (2 if kind == "raises" else 0), told
