"""Wire formats against numbers worked out by hand, and what each promises about its error."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from core import UserError
from core.assembly.config import WireConfig
from core.wires.formats import BLOCK, INTS, WIRES, decode, encode, nbytes
from tests.problems import Mean
from training.sampling import generator

NARROW = WIRES[1:]
INT = {"int8": 8, "int4": 4, "int2": 2}
BITS = {"bfloat16": 16.0, "float16": 16 + 1 / 8} | {wire: bits + 1 / 8 for wire, bits in INT.items()}  # an element


def block(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """[256]: the values, then zeros."""
    x = torch.zeros(BLOCK, dtype=dtype)
    x[: len(values)] = torch.tensor(values, dtype=dtype)
    return x


def through(x: Tensor, wire: str) -> Tensor:
    return decode(encode(x, wire), wire, x.dtype)


@pytest.mark.parametrize("wire", NARROW)
def test_bytes(wire: str):
    assert nbytes(wire, 512) == 512 * BITS[wire] / 8 == len(encode(torch.ones(512), wire))
    assert encode(torch.ones(0), wire).shape == (0,) and through(torch.ones(0), wire).shape == (0,)
    with pytest.raises(AssertionError, match="100 elements"):
        nbytes(wire, 100)


def test_int4_bytes_by_hand():
    """Scale 14 / 7 = 2, so 14, -3, 5, 2.9 are 7, -1.5, 2.5, 1.45: to nearest, ties to even, 7, -2, 2, 1."""
    payload = encode(block(14.0, -3.0, 5.0, 2.9), "int4")
    assert payload[:4].view(torch.float32).item() == 2.0
    assert payload[4:9].tolist() == [0x80 + 15, 0x80 + 6, 0x80 + 10, 0x80 + 9, 0x80 + 8]  # 8 stands for 0
    assert decode(payload, "int4")[:5].tolist() == [14.0, -4.0, 4.0, 2.0, 0.0]
    x = torch.zeros(BLOCK)
    x[130] = -7.0  # the other half: the upper four bits of byte 2
    assert encode(x, "int4")[4:8].tolist() == [0x88, 0x88, 0x18, 0x88]
    assert torch.equal(through(x, "int4"), x)


@pytest.mark.parametrize(("wire", "levels"), [("int2", 1), ("int4", 7)])
def test_every_level_at_every_place_comes_back(wire: str, levels: int):
    """With a scale of 1 whole numbers are exact: packed and unpacked they are themselves."""
    q = torch.randint(-levels, levels + 1, (200, BLOCK), generator=generator(0)).float()
    q[:, 0] = levels
    assert torch.equal(through(q.view(-1), wire), q.view(-1))
    assert len(encode(q.view(-1), wire)) == 200 * (4 + 32 * int(wire[3]))


def test_int2_bytes_by_hand():
    """Elements 0, 64, 128 and 192 share a byte; a zero is 2."""
    x = torch.zeros(BLOCK)
    x[0], x[128] = 15.0, -15.0
    assert encode(x, "int2")[4:6].tolist() == [3 + (2 << 2) + (1 << 4) + (2 << 6), 0b10101010]


def test_int8_bytes_by_hand():
    payload = encode(torch.cat([block(-63.5, 63.5, 0.2, 0.3, -0.3), block(0.0), block(254.0, 3.0)]), "int8")
    blocks = payload.view(3, 260)
    assert blocks[:, :4].clone().view(torch.float32).flatten().tolist() == [0.5, 0.0, 2.0]
    assert blocks[0, 4:10].view(torch.int8).tolist() == [-127, 127, 0, 1, -1, 0]
    values = decode(payload, "int8").view(3, BLOCK)
    assert values[0, :5].tolist() == [-63.5, 63.5, 0.0, 0.5, -0.5]
    assert not values[1].any() and values[2, :2].tolist() == [254.0, 4.0]


def test_float16_keeps_what_a_plain_cast_would_flush():
    tiny = block(1.5e-9, 3e-12)
    assert not tiny.to(torch.float16).any()
    assert through(tiny, "float16")[:2].tolist() == pytest.approx([1.5e-9, 3e-12], rel=2**-11)
    huge = block(1e30, -3e25)
    assert through(huge, "float16")[:2].tolist() == pytest.approx([1e30, -3e25], rel=2**-11)
    payload = encode(block(1.0, -0.75), "float16")  # 1 = 2^-14 x 2^14
    assert payload[:4].view(torch.float32).item() == 2.0**-14
    assert payload[4:8].clone().view(torch.float16).tolist() == [2.0**14, -0.75 * 2**14]


def test_bfloat16_is_the_plain_cast():
    x = torch.randn(1024, generator=generator(0)) * 1e-20
    assert torch.equal(through(x, "bfloat16"), x.to(torch.bfloat16).float())


def bound(x: Tensor, wire: str) -> Tensor:
    """The largest allowed error."""
    top = x.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)
    return {"bfloat16": x.abs() * 2**-8, "float16": (x.abs() * 2**-11).maximum(top * 2**-39)}.get(
        wire, top / (2 ** INT[wire] - 2) if wire in INT else top
    )


@pytest.mark.parametrize("wire", NARROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_error_stays_within_the_format(wire: str, dtype: torch.dtype):
    """Blocks of sizes from 1e-30 to 1e30, values inside a block over twelve orders of magnitude."""
    x = torch.randn(61, BLOCK, generator=generator(0), dtype=dtype)
    x = x * 10 ** (torch.rand(61, BLOCK, generator=generator(2), dtype=dtype) * 12 - 12)
    x = (x * 10 ** torch.arange(-30, 31, dtype=dtype)[:, None]).view(-1)
    tiny = 1e-38 if wire == "bfloat16" else 0.0  # of smaller numbers it keeps fewer digits, as float32 does
    assert ((through(x, wire) - x).abs() <= bound(x, wire) * (1 + 1e-5) + tiny).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wire", NARROW)
def test_what_is_not_finite_stays_so(wire: str, bad: float):
    x = torch.randn(3 * BLOCK, generator=generator(0))
    x[300] = bad
    finite = through(x, wire).isfinite().view(3, BLOCK)
    assert finite[0].all() and finite[2].all()
    assert not finite[1, 44] if wire == "bfloat16" else not finite[1].any()


@pytest.mark.parametrize("wire", NARROW)
def test_a_float64_beyond_float32_does_not_become_finite(wire: str):
    assert not through(block(1e300, 1.0, dtype=torch.float64), wire)[0].isfinite()
    assert torch.equal(through(block(1e-300, dtype=torch.float64), wire), torch.zeros(BLOCK).double())


@pytest.mark.parametrize("wire", INTS)
def test_the_scale_of_zeros_has_no_sign(wire: str):
    """Whether maximum(0, -0) is 0 or -0 is the device's choice: the bytes must not depend on it."""
    plus, minus = encode(torch.zeros(BLOCK), wire), encode(-torch.zeros(BLOCK), wire)
    assert plus[:4].tolist() == minus[:4].tolist() == [0, 0, 0, 0]


class Divisors(TorchDispatchMode):
    """What has been divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [args[1]] if func.name().startswith("aten::div") else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wire", NARROW)
def test_nothing_is_divided_by_a_plain_number(wire: Any):
    """CUDA multiplies by its rounded reciprocal, so that its bytes and means would not be a CPU's."""
    mean = Mean([torch.ones(700)], {"steps": 1, "weight": 1}, WireConfig(wire).reducer, buffers=[torch.ones(5)])
    with Divisors() as divisors:
        mean.reducer._average(mean.reducer._outgoing())
    assert len(divisors.seen) > 2 and all(isinstance(d, Tensor) for d in divisors.seen), divisors.seen


@pytest.mark.gpu
@pytest.mark.parametrize("wire", NARROW)
def test_cuda_gives_the_same_mean(wire: Any):
    x = torch.randn(3 * BLOCK, generator=generator(0)) * 1e-4
    seen = []
    for device in ("cpu", "cuda"):
        p, buffer = torch.zeros(700, device=device), torch.zeros(5, device=device)
        mean = Mean([p], {"steps": 1, "weight": 1}, WireConfig(wire).reducer, buffers=[buffer])
        for _ in range(3):
            mean.buckets[0].flat[:705] = x[:705].to(device)
            mean.reduce(2.0)
        seen.append([mean.buckets[0].flat.cpu(), *(f.cpu() for fs in mean.reducer.state.values() for f in fs)])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


# -- what is refused --------------------------------------------------------------------------------------------


def test_another_backend_is_refused_with_the_reason():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(UserError) as caught:
            WireConfig("int8").check([torch.zeros(3)], None)
    finally:
        dist.destroy_process_group()
    text = "wire.format='int8' over fake backend for cpu tensors: only gloo and nccl do, or use wire.format float32"
    assert str(caught.value) == text


def test_two_devices_are_refused():
    with pytest.raises(UserError, match="on cpu, meta: .* one device, or use wire.format float32"):
        WireConfig("int4").check([torch.zeros(3), torch.zeros(3, device="meta")], None)


def test_an_unknown_format_is_refused():
    unknown: Any = "fp8"
    with pytest.raises(UserError) as caught:
        WireConfig(unknown)
    assert str(caught.value) == f"wire.format='fp8': choose one of {', '.join(WIRES)}, lgreco, auto"
