"""save() takes what load() gives back with its type, and refuses anything else by its path."""

import tempfile
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from core import CO2, CO2Config, UserError, load, save
from core.checkpoint import runs as checkpoint
from core.checkpoint import stored
from core.integrations.common import load_own, save_own
from tests import problems
from tests.on_ranks import on_ranks


class Codes(Tensor):
    """8-bit numbers and their scale, as torchao's optimiser states are: a wrapper without numbers of its own."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, signed: bool, shape: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype)

    def __init__(self, codes: Tensor, scale: Tensor, signed: bool, shape: Any):
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], [self.signed, self.shape]

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, *_: Any) -> Any:
        return cls(parts["codes"], parts["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        if func is torch.ops.aten._to_copy.default:
            (self,) = args
            return cls(self.codes.clone(), self.scale.clone(), self.signed, self.shape)
        raise NotImplementedError(f"{func}")


class Unknown(Codes):
    """Not given to torch.serialization.add_safe_globals."""


class Plain(Tensor):
    """Without __tensor_flatten__."""


class Point(NamedTuple):
    x: float
    y: Tensor


Pair = namedtuple("Pair", "a b")
Strange = namedtuple("Strange", "a")


@dataclass(frozen=True)
class Settings:
    rate: float
    sizes: tuple[int, ...]
    weight: Tensor


@dataclass
class Other:
    a: int = 1


class Whole(int):
    pass


torch.serialization.add_safe_globals([Codes, Plain, Point, Pair, Settings])


def codes(kind: type = Codes) -> Any:
    return kind(torch.arange(6, dtype=torch.uint8), torch.tensor([0.5, 0.25]), True, torch.Size([2, 3]))


def back(value: Any) -> Any:
    """What comes back by way of the files."""
    with tempfile.TemporaryDirectory() as folder:
        entry = stored.write(Path(folder), 0, stored.on_host({"it": value}), [{}])
        return stored.read(Path(folder), 0, {"rank0.pt": entry})["it"]


def equal(a: Any, b: Any) -> bool:
    """Of one type, with equal content, down to the bits of numbers."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Codes):
        return equal(a.__tensor_flatten__(), b.__tensor_flatten__()) and equal([a.codes, a.scale], [b.codes, b.scale])
    if isinstance(a, Tensor):
        same = (a.dtype, a.shape) == (b.dtype, b.shape)
        return same and [*stored.digests(a).values()] == [*stored.digests(b).values()]
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Settings):
        return equal(vars(a), vars(b))
    if isinstance(a, dict):
        made = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return made and equal([*a], [*b]) and equal([*a.values()], [*b.values()])
    if isinstance(a, list | tuple | deque):
        ends = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return ends and len(a) == len(b) and all(map(equal, a, b))
    return repr(a) == repr(b)


MATRIX = torch.arange(12.0).view(3, 4) % 5
DTYPES = ["float64", "bfloat16", "float8_e4m3fn", "bool", "uint16", "int64", "complex64"]
VALUES: dict[str, Any] = {
    "dtypes": [MATRIX.to(getattr(torch, name)) for name in DTYPES],
    "views": [MATRIX[0, 0], MATRIX[:0], MATRIX.T, MATRIX[1:, ::2], MATRIX[:1, :1].expand(3, 2)],
    "containers": [
        (MATRIX, None),
        Point(0.5, MATRIX),
        Settings(0.5, (1,), MATRIX),
        OrderedDict(b=MATRIX),
        {0: 1, "0": 2},
    ],
    "numbers": [0, -1, 2**127 + 1, 1.5, float("inf"), -0.0, 5e-324, True, None, 1 + 2j],
    "texts": ["", "ä\u2028\x00", b"\x00\xff", PosixPath("/a b/c")],
    "sets": [{1, 2}, frozenset({"a"}), set()],
    "keys": {1: "a", "1": "A", (1, 2): "b", None: "c", 1.5: "d", False: "e"} | {np.float64(7.0): "f"},
    "pair": Pair([1, (2,)], {"a": Pair(1, 2)}),
    "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.get_rng_state()],
    "numpy's numbers": [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True), np.complex64(1j)],
    "arrays": [np.arange(6).reshape(2, 3).T, np.zeros((0, 2)), np.array(["a", "bc"]), np.array([(1, 2.0)], "i4,f8")],
    "PCG64": np.random.default_rng(0).bit_generator.state,
    "MT19937": np.random.RandomState(0).get_state(),
    "a wrapper": [codes(), {"exp_avg": codes()}],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_with_their_types(name: str):
    found = back(VALUES[name])
    assert equal(found, VALUES[name])
    places = [t.data_ptr() for t in found if isinstance(t, Tensor) and t.numel()] if isinstance(found, list) else []
    assert len({*places}) == len(places), "each tensor has memory of its own"


REFUSED: dict[str, tuple[Any, str]] = {
    "an object": (object(), "save(): a.0 is a builtins.object, which"),
    "a function": (len, "builtin_function_or_method, which torch.load cannot read back: give plain values, or call"),
    "a module": (nn.Linear(1, 1), "is a torch.nn.modules.linear.Linear, which"),
    "an unknown named tuple": (Strange(1), "add_safe_globals([tests.core.test_stored.Strange]) where the program"),
    "an unknown dataclass": (Other(), "add_safe_globals([tests.core.test_stored.Other])"),
    "an unknown wrapper": (codes(Unknown), "add_safe_globals([tests.core.test_stored.Unknown])"),
    "a number's subclass": (Whole(3), "add_safe_globals([tests.core.test_stored.Whole])"),
    "an array of objects": (np.array([{}, None]), "is a numpy.ndarray, which torch.load cannot read back"),
    "a made default": (defaultdict(lambda: 0), "is a collections.defaultdict, which cannot be saved"),
    "a queue": (deque([1]), "is a collections.deque, which torch.load cannot read back: give plain values"),
    "a meta tensor": (torch.empty(3, device="meta"), "['a'][0] cannot be copied to host memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_come_back_is_refused_by_its_path(name: str):
    value, told = REFUSED[name]
    with pytest.raises(UserError) as caught:
        stored.on_host({"a": [value]})
    assert str(caught.value).startswith("save(): ") and told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_that_cannot_come_back_and_a_state_without_end():
    with pytest.raises(UserError, match=r"save\(\): a is a tests.core.test_stored.Whole"):
        stored.on_host({"a": {Whole(1): 2}})
    held: list[Any] = []
    held.append(held)
    with pytest.raises(UserError, match="the state is nested too deeply"):
        stored.on_host(held)


class Kept:
    """What has a state of any kind."""

    def __init__(self, value: Any = None):
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


class Lookahead(torch.optim.Optimizer):
    """Holds another optimizer, as timm's does."""

    def __init__(self, inner: torch.optim.Optimizer):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


class Odd(torch.optim.SGD):
    """Keeps what torch's load_state_dict casts, takes apart, or fails for."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for p in self.param_groups[0]["params"]:
            if not (state := self.state[p]):
                wide = p.detach().float().clone()
                state |= {"master": wide + 1e-5, "seen": torch.zeros((), dtype=torch.int64), "phase": "warm", "k": 7}
                state |= {"half": torch.zeros_like(p, dtype=torch.bfloat16), "mask": p > 0, "raw": b"ab"}
                state |= {"point": Point(0.5, wide * 3), "array": np.arange(3), "rate": np.float32(0.1), "none": None}
                state |= {"list": [wide * 5, (wide.double(), "x")], "shape": p.shape}
                state |= {"more": OrderedDict(a=Counter([1, 1]), b={"w": wide.half()}), "deep": [[Point(1.0, wide)]]}
            state["seen"] += 1
            state["master"] -= 0.01 * p.grad.float()
            p.copy_(state["master"] + state["list"][0] - state["list"][0].to(p.dtype))


def odd_loop(dtype: torch.dtype, wraps: Any) -> tuple[nn.Module, Any, CO2]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3).to(dtype)
    return model, wraps(Odd(model.parameters(), 0.1)), CO2(model.parameters(), CO2Config(tau=2))


def odd_steps(model: nn.Module, optimizer: Any, co2: CO2, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        model(x).float().square().mean().backward()
        optimizer.step(), optimizer.zero_grad(), co2.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("how", ["save", "save_own", "a wrapper"])
def test_an_optimizers_state_comes_back_with_its_types(dtype: torch.dtype, how: str, tmp_path: Path):
    """By way of save() and load(), of the integrations' files, and in an optimizer that holds another one."""
    wraps = Lookahead if how == "a wrapper" else lambda optimizer: optimizer
    first, second = odd_loop(dtype, wraps), odd_loop(dtype, wraps)
    odd_steps(*first, range(3))
    if how == "save_own":
        for held in first[1].state.values():
            for key in ("point", "deep"):  # weights_only does not read these
                del held[key]
        parts = [dict(zip(("model", "optimizer", "co2"), loop, strict=True)) for loop in (first, second)]
        save_own("a test", tmp_path, **parts[0])
        load_own("a test", tmp_path, **parts[1])
    else:
        assert save(tmp_path, *first, step=3) and load(tmp_path, *second) == 3
    states = [loop[1].state_dict()["state"] for loop in (first, second)]
    for number, held in states[0].items():
        for key, value in held.items():
            assert equal(value, states[1][number][key]), key
    odd_steps(*first, range(3, 9))
    odd_steps(*second, range(3, 9))
    assert all(map(torch.equal, first[0].parameters(), second[0].parameters()))


def test_a_folder_without_a_checkpoint_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    loop = odd_loop(torch.float32, lambda optimizer: optimizer)
    with caplog.at_level("INFO", "co2_training"):
        assert load(tmp_path / "typo", *loop) is None
    assert f"no checkpoint in {tmp_path / 'typo'}: training starts afresh" in caplog.text


@on_ranks(2)
def test_a_shards_float32_state_stays_float32(rank: int):  # noqa: ARG001
    """Of bfloat16 parameters in FSDP2, whose state is DTensors."""
    model = nn.Linear(8, 4, dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for p in model.parameters():
        optimizer.state[p] = {"master": p.detach().float() / 3}
    before = [optimizer.state[p]["master"].to_local().clone() for p in model.parameters()]
    held = stored.on_host(checkpoint.of_optimizer(optimizer, model))
    optimizer.state.clear()
    checkpoint.load_optimizer(optimizer, model, held)
    after = [optimizer.state[p]["master"].to_local() for p in model.parameters()]
    assert all(a.dtype == torch.float32 for a in after) and all(map(torch.equal, before, after))


PLAIN: dict[str, Any] = {"best": 3.5, "name": "run a", "losses": [1.0, 2, None], "done": True, "numpy": (1, np.ones(2))}


@on_ranks(2)
def test_plain_values_are_saved_next_to_objects(rank: int, tmp_path: Path):  # noqa: ARG001
    model = problems.small_net()
    co2, kept = CO2(model.parameters(), CO2Config(tau=1)), Kept(5)
    assert save(tmp_path, model, None, co2, step=1, others={"kept": kept, **PLAIN})
    mine: dict[str, Any] = {"kept": Kept()} | dict.fromkeys(PLAIN, 0)
    assert load(tmp_path, model, None, co2, others=mine) == 1
    assert mine.pop("kept").value == 5 and equal([*map(mine.get, PLAIN)], [*PLAIN.values()])
    said = problems.refusal(load, tmp_path, model, None, co2, others={"kept": Kept()} | dict.fromkeys(PLAIN, Kept()))
    assert "step 1 has the plain value 3.5 as others['best']: give a plain value here, too" in said
    said = problems.refusal(save, tmp_path, model, None, co2, step=2, others={"best": len})
    assert said.startswith("save(): others.best is a builtins.builtin_function_or_method, which torch.load cannot")
    co2.close()


@on_ranks(2)
def test_a_refusal_of_one_worker_is_one_of_all(rank: int, tmp_path: Path):
    model = problems.small_net(torch.float32)
    co2, kept = CO2(model.parameters(), CO2Config(tau=1)), Kept(len if rank == 1 else 1)
    said = problems.refusal(save, tmp_path, model, None, co2, step=0, others={"kept": kept})
    assert said.startswith("save(): others.kept.value is a builtins.builtin_function_or")
    assert not [*tmp_path.iterdir()]


class Wrapper(nn.Module):
    def __init__(self, name: str, model: nn.Module):
        super().__init__()
        setattr(self, name, model)


WRAPPED: dict[str, Any] = {
    "DistributedDataParallel": lambda net: Wrapper("module", net),
    "compiled": torch.compile,
    "both": lambda net: torch.compile(Wrapper("module", net)),
    "a compiled layer": lambda net: nn.Sequential(torch.compile(net[0]), *net[1:]),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrappers_prefix_is_named(name: str, tmp_path: Path):
    nets = [problems.small_net(torch.float32), WRAPPED[name](problems.small_net(torch.float32))]
    for i, (before, after) in enumerate((nets, nets[::-1])):
        co2 = CO2(before.parameters())
        save(tmp_path / str(i), before, None, co2, step=0)
        said = problems.refusal(load, tmp_path / str(i), after, None, CO2(after.parameters()))
        assert "as a wrapper gives names a prefix: save and load the model inside the wrapper" in said


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = problems.small_net(torch.float32)
    save("~/run", model, None, CO2(model.parameters()), step=3)
    assert (tmp_path / "run" / "step000000003").is_dir()
    assert load("~/run", model, None, CO2(model.parameters())) == 3


def test_a_model_in_8_bit_floats_is_saved(tmp_path: Path):
    model = problems.small_net(torch.float32)
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        model.frozen = nn.Parameter(torch.ones(3).to(kind), requires_grad=False)
        folder, co2 = tmp_path / str(kind), CO2(problems.small_net().parameters())
        assert save(folder, model, None, co2, step=1)
        model.frozen = nn.Parameter(torch.tensor([1.0, float("nan")]).to(kind), requires_grad=False)
        assert not save(folder, model, None, co2, step=2)


def test_two_models_of_one_process_do_not_share_a_folder(tmp_path: Path):
    """The second one's save would remove the first one's checkpoints."""
    one, other = (CO2(problems.small_net().parameters()) for _ in range(2))
    assert save(tmp_path, problems.small_net(), None, one, step=5)
    with pytest.raises(UserError, match="this process neither wrote nor loaded|later"):
        save(tmp_path, problems.small_net(), None, other, step=1)
