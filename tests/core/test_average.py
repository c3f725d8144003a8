"""average=: tensors that are evaluated and are not the parameters are equal on all workers."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from core import CO2, CO2Config, CompressionConfig, UserError, node_mesh
from core.baselines import DiLoCo, LocalSGD, OverlapLocalSGD, SlowMo
from tests.on_ranks import alike, on_ranks


def momenta(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Tensors that an optimizer makes in its first step."""
    return [optimizer.state[p]["momentum_buffer"] for group in optimizer.param_groups for p in group["params"]]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def batch(number: int, source: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(10_000 * source + number)
    inputs, noise = torch.randn(16, 8, generator=draws), torch.randn(16, 1, generator=draws)
    return inputs, inputs.tanh().sum(1, keepdim=True) / 2 + 0.5 * noise


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return (model(inputs) - targets).square().mean()


def floats(model: nn.Module) -> Tensor:
    return torch.cat([t.detach().flatten() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()])


# -- each method, and what sync_for_eval() does --------------------------------------------------------------------

METHODS: dict[str, Callable[..., Any]] = {
    "CO2": lambda params, **more: CO2(params, CO2Config.paper(2), **more),
    "CO2 recommended": lambda params, **more: CO2(params, CO2Config.recommended(tau=2), **more),
    "CO2 merged later": lambda params, **more: CO2(
        params, CO2Config(tau=2, merge="keep_local", delay=1, gap="none", outer_momentum=0.0), **more
    ),
    "CO2 int8": lambda params, **more: CO2(params, CO2Config(tau=2, compression=CompressionConfig("int8")), **more),
    "LocalSGD": lambda params, **more: LocalSGD(params, 2, **more),
    "SlowMo": lambda params, **more: SlowMo(params, 2, **more),
    "DiLoCo": lambda params, **more: DiLoCo(params, 2, **more),
    "OverlapLocalSGD": lambda params, **more: OverlapLocalSGD(params, 2, **more),
    "CO2 shard": lambda params, **more: CO2(params, CO2Config.paper(2), shard=True, **more),
    "CO2 offload": lambda params, **more: CO2(params, CO2Config.paper(2), offload=True, **more),
}


def write(model: nn.Module, rank: int, step: int) -> None:
    """An optimizer's step, as far as a method sees it."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + rank)))


@on_ranks(2, timeout=120)
def test_every_method_averages_at_finish_and_where_settle_makes_workers_equal(rank: int):
    for name, make in METHODS.items():
        model, extra = net(0), [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros((), dtype=int)]
        method, lent = make(model.parameters(), average=extra), []
        for step in range(7):
            write(model, rank, step)
            method.step()
            if method.at_boundary:
                for i, t in enumerate(extra):
                    t.fill_(i + 10 * rank)
                with method.averaged_model() as equal:
                    lent.append((equal, torch.cat([t.flatten().double() for t in extra])))
        for i, t in enumerate(extra):
            t.fill_(i + 10 * rank)
        method.finish()
        method.close()
        for i in range(2):
            assert extra[i].unique().item() == i + 5 and extra[i].dtype == (torch.float32, torch.float64)[i], name
        assert extra[2] == 2 + 10 * rank, f"{name}: an integer is left as it is"
        assert len(lent) == 3
        for equal, values in lent:
            shift = 5 if equal else 10 * rank
            assert values.tolist() == [0 + shift] * 3 + [1 + shift] * 4 + [2 + 10 * rank], name
        assert name == "CO2 merged later" or all(equal for equal, _ in lent), name


@on_ranks(4, timeout=120)
def test_nodes_average_whole_tensors_over_all_and_shards_across_nodes(rank: int):
    """Two nodes of two workers: a plain EMA, and shards of one that is made of DTensors."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh, model = node_mesh("cpu", 2), net(0)
    ema = [torch.full((3,), float(rank))]
    co2 = CO2(model.parameters(), CO2Config.paper(2), mesh=mesh, average=ema)
    ema[0].fill_(float(rank))  # all have begun as on the first worker
    co2.step()
    co2.finish()
    co2.close()
    assert ema[0].tolist() == [1.5] * 3
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh["shard"], [Shard(0)]))]
    sharded = distribute_tensor(torch.zeros(4, 2), mesh["shard"], [Shard(0)])
    plain = torch.zeros(1, dtype=torch.bfloat16)
    co2 = CO2(params, CO2Config.paper(2), mesh=mesh, average=lambda: [sharded, plain])
    assert isinstance(sharded, DTensor)
    sharded.to_local().fill_(float(rank))
    plain.fill_(rank)
    co2.step()
    co2.finish()
    co2.close()
    assert sharded.to_local().unique().item() == (1.0 if rank % 2 == 0 else 2.0) and plain.item() == 1.5


# -- uneven workers, resume, and what is refused -------------------------------------------------------------------


@on_ranks(2)
def test_workers_may_come_to_finish_after_different_numbers_of_steps(rank: int):
    """Worker 1 has more batches; finish(), more steps, finish() again."""
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    co2 = CO2([*model.parameters(), frozen], CO2Config.recommended(tau=2), average=partial(momenta, optimizer))
    co2.finish()  # no worker has taken a step: there is nothing to average
    for steps in (3 + 4 * rank, 2):
        for number in range(steps):
            loss(model, *batch(number, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            co2.step()
        co2.finish()
        ends = floats(model), torch.cat([z.flatten() for z in momenta(optimizer)])
        assert alike(*ends) and not any(t.isnan().any() for t in ends)
    co2.close()


@on_ranks(2)
def test_dtypes_strides_and_a_frozen_module(rank: int):
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
    transposed = torch.zeros(3, 2).T
    extra = [*(torch.zeros(2, dtype=kind) for kind in kinds), torch.zeros(0), transposed]
    module = nn.BatchNorm1d(2)
    for p in module.parameters():
        p.requires_grad_(False)
    first = LocalSGD(net(0).parameters(), 2, average=extra)
    second = LocalSGD(net(0).parameters(), 2, average=module)
    for t in (*extra, *module.parameters(), *module.buffers()):
        t.data.fill_(1 + 2 * rank)
    with torch.inference_mode():
        for method in (first, second):
            method.finish()
    *averaged, batches = (t.double() for t in (*extra, *module.parameters(), *module.buffers()))
    assert all(t.unique().tolist() == ([2.0] if t.numel() else []) for t in averaged)
    assert batches == 1 + 2 * rank, "num_batches_tracked is an integer"


@on_ranks(2)
def test_a_worker_does_not_count_where_its_tensor_is_not_finite(rank: int):
    """A NaN on worker 1, a mask of -inf on both, and worker 0 that differs in a third tensor only."""
    tensors = [torch.ones(2), torch.full((2,), float("-inf")), torch.zeros(2)]
    co2 = LocalSGD(net(0).parameters(), 2, average=tensors)
    tensors[0].fill_(float("nan") if rank else 3.0)
    tensors[2].fill_(float(rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        co2.finish()
    assert [t[0].item() for t in tensors] == [3.0, float("-inf"), 0.5]
    told = "average: 1 of 3 tensors were not finite on some workers, which did not count there"
    assert [str(w.message) for w in caught] == ([] if rank else [told])


@on_ranks(2, timeout=120)
def test_what_one_worker_gives_otherwise_is_an_error_on_all(rank: int):
    """No worker hangs."""
    said = []

    def attempt(steps: int, **given: Any) -> None:
        model = net(0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        try:
            if given.get("average") == "momenta":
                given["average"] = partial(momenta, optimizer)
            method = LocalSGD(model.parameters(), 4, **given)
            for number in range(steps):
                loss(model, *batch(number, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
                method.step()
            method.finish()
        except UserError as error:
            said.append(str(error))
        else:
            said.append("nothing")

    attempt(1, average=[torch.zeros(2 + rank)])
    attempt(1, **({"average": [torch.zeros(2)]} if rank else {}))
    attempt(1, average=lambda: [torch.zeros(2), torch.zeros(2 + rank)])
    attempt(1, average=lambda: [torch.zeros(2)] * (1 - rank))
    attempt(1, average=lambda: [torch.zeros(2, device="meta" if rank else "cpu")])
    attempt(1, average=lambda: {}["z"] if rank else [torch.zeros(2)])
    attempt(rank, average="momenta")  # worker 0 has taken no step
    attempt(0, average="momenta")
    attempt(4, average="momenta")
    assert "rank 0 has (2,), against (3,)" in said[0] or "against ((3,)" in said[0], said[0]
    assert "against average= with 1 tensors of rank 1" in said[1], said[1]
    assert "rank 0 has ((2,), 'torch.float32'), against ((3,), 'torch.float32') of rank 1" in said[2]
    assert "rank 0 has 1 tensors, against 0 tensors of rank 1: give all workers the same" in said[3]
    assert "meta device" in said[4] and "KeyError: 'z'" in said[5]
    assert "rank 0 has 0 tensors, against 4 tensors of rank 1" in said[6] and "every worker must take one" in said[6]
    assert said[7:] == ["nothing", "nothing"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda model: model,
            r"shape \(32, 8\) shares its memory with the parameters or buffers that LocalSGD averages",
        ),
        (lambda model: [model[0].weight.data[1:]], "shares its memory"),
        (lambda model: model[0].weight, "average: one Parameter is given: give a list"),
        (lambda model: torch.optim.SGD(model.parameters(), 0.1), "one SGD is given"),
        (lambda model: model.state_dict(), "average: a str is among them"),
        (lambda model: [torch.zeros(2, dtype=torch.complex64)], "view_as_real"),
        (lambda model: [torch.eye(2).to_sparse()], "torch.sparse_coo: only dense"),
        (lambda model: nn.Linear(2, 2, device="meta"), "meta device"),
        (lambda model: [torch.zeros(1).expand(3)], "is expanded"),
        (lambda model: nn.LazyLinear(2), "no shape yet"),
        (lambda model: [torch.zeros(2, dtype=int)], "no floating-point tensor"),
    ],
)
def test_what_cannot_be_averaged_is_refused_when_the_method_is_made(given: Callable[[nn.Module], Any], message: str):
    model = net(0)
    with pytest.raises(UserError, match=message) as raised:
        LocalSGD(model.parameters(), 2, average=given(model))
    assert "\n" not in str(raised.value)


def test_one_worker_alone_and_an_empty_list_change_nothing():
    for extra in ([torch.ones(2)], [], None):
        method = LocalSGD(net(0).parameters(), 2, average=extra)
        assert method.sync_for_eval()
        method.finish()
        assert not extra or extra[0].tolist() == [1, 1]


@on_ranks(2)
def test_nothing_is_saved_and_a_run_goes_on_bit_for_bit(rank: int):
    """EMA and parameters at the end: of a run in one piece, and of one that goes on from its state in mid-run."""
    found = []
    for cut in (False, True):
        model = net(0)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        co2 = CO2(model.parameters(), CO2Config.paper(2), average=ema)
        for number in range(8):
            if cut and number == 4:
                held = co2.state_dict(), copy.deepcopy(model.state_dict()), copy.deepcopy(ema.state_dict())
                co2.finish()
                co2.close()
                co2 = CO2(model.parameters(), CO2Config.paper(2), average=ema)
                co2.load_state_dict(held[0])
                model.load_state_dict(held[1])
                ema.load_state_dict(held[2])
            write(model, rank, number)
            ema.update_parameters(model)
            co2.step()
        co2.finish()
        found.append(torch.cat([floats(model), floats(ema)]))
    assert torch.equal(*found) and alike(*found)
