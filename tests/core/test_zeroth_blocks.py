"""Blocks that pass through the device one at a time: the same losses and weights, with the same bits."""

import functools
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from core import UserError
from core.testing import run_distributed
from core.zeroth import ZerothConfig, ZerothOrder
from core.zeroth.blocks import BlockStream

BLOCKS = 4


class Model(nn.Module):
    """An embedding and a head that share their weight, a norm, and blocks that are a little unlike."""

    def __init__(self, blocks: int = BLOCKS):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 10 + i), nn.Tanh(), nn.Linear(10 + i, 8)) for i in range(blocks)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def batch(step: int) -> Tensor:
    return torch.randint(20, (4, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def streamed(config: ZerothConfig, model: Model | None = None, **options) -> tuple[Model, ZerothOrder, BlockStream]:
    model = model or Model()
    make = functools.partial(BlockStream, blocks=list(model.blocks), **options)
    zo = ZerothOrder(model, config, lr=0.1, timeout=60, make_forward=make)
    assert isinstance(zo._forward, BlockStream)
    return model, zo, zo._forward


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def compared(rank: int, world_size: int, config: ZerothConfig) -> bool:
    plain = Model()
    whole = ZerothOrder(plain, config, lr=0.1, timeout=60)
    model, zo, _ = streamed(config)
    for step in range(5):
        ids = batch(10 * step + zo.data_rank)

        def loss(m: nn.Module, ids: Tensor = ids) -> Tensor:  # in micro-batches: two sweeps over the blocks
            return sum(loss_of(m, part) for part in ids.chunk(2)) / 2  # pyright: ignore[reportReturnType]

        first, second = whole.step(loss, 4), zo.step(loss, 4)
        assert str(first) == str(second), step
        assert not same(model, plain) or not config.delay or step == 0, "put off until the blocks come by"
        if step == 3:
            zo.flush()
            assert same(model, plain), "deferred and flushed is immediate"
    whole.finish()
    zo.finish()
    whole.close()
    zo.close()
    return same(model, plain)


@pytest.mark.parametrize(
    "config",
    [ZerothConfig(weight_decay=0.1), ZerothConfig(delay=1, directions=2)],
    ids=["decayed", "delayed, two directions"],
)
def test_streamed_blocks_give_the_same_bits(config):
    assert compared(0, 1, config)


def test_streamed_blocks_give_the_same_bits_in_a_pair():
    assert run_distributed(compared, 2, ZerothConfig(weight_decay=0.1)) == [True, True]


def test_a_step_moves_each_block_once_each_way_and_three_lie_on_the_device():
    model, zo, stream = streamed(ZerothConfig())
    each = [block.nbytes for block in stream.blocks]
    for step in range(3):
        zo.step(lambda m, ids=batch(step): loss_of(m, ids), 4)  # noqa: B008
    assert stream.upload.bytes == 3 * sum(each), "both sides of a step share an upload"
    assert stream.offload.bytes == 2 * sum(each), "in the first step nothing had changed"
    embedding = model.embed.weight.nbytes
    assert embedding <= 2 * max(each)
    assert stream.device_bytes == 3 * max(each), (
        "the perturbed embedding finds room before the first block and after the last"
    )


def test_an_embedding_larger_than_two_blocks_is_counted():
    model = Model()
    model.embed = nn.Embedding(2000, 8)
    model.head.weight = model.embed.weight
    _, zo, stream = streamed(ZerothConfig(), model)
    zo.step(lambda m: loss_of(m, batch(0)), 4)
    assert stream.device_bytes == 3 * max(b.nbytes for b in stream.blocks) + model.embed.weight.nbytes


def test_uploads_hide_under_computation_that_outlasts_them():
    model, zo, stream = streamed(ZerothConfig(), hold=lambda nbytes: time.sleep(0.02))
    for block in model.blocks:
        block.register_forward_hook(lambda *_: time.sleep(0.06))
    zo.step(lambda m: loss_of(m, batch(0)), 4)
    before, uploaded = stream.waited, stream.upload.seconds
    zo.step(lambda m: loss_of(m, batch(1)), 4)
    first = 1 / BLOCKS  # of the uploads: before the first block there is little to hide it under
    assert stream.waited - before < (first + 0.2) * (stream.upload.seconds - uploaded)


def test_a_run_resumes_where_updates_were_put_off():
    (model, zo, _), (other, resumed, _) = streamed(ZerothConfig()), streamed(ZerothConfig())
    plain = Model()
    whole = ZerothOrder(plain, lr=0.1)
    for step in range(3):
        zo.step(lambda m, ids=batch(step): loss_of(m, ids), 4)  # noqa: B008
    state = zo.state_dict()
    assert len(state["pending"]) == 1
    for each, net in ((resumed, other), (whole, plain)):
        net.load_state_dict(model.state_dict())
        each.load_state_dict(state)
    for step in range(3, 6):
        for each in (zo, resumed, whole):
            each.step(lambda m, ids=batch(step): loss_of(m, ids), 4)  # noqa: B008
    for each in (zo, resumed, whole):
        each.finish()
    assert same(model, other) and same(model, plain)


def test_a_model_whose_loss_fails_is_left_as_it_was():
    for config in (ZerothConfig(), ZerothConfig(directions=2)):
        model, zo, _ = streamed(config)
        calls = []

        def loss(m: nn.Module, calls: list = calls) -> Tensor:
            found = loss_of(m, batch(0))
            calls.append(found)
            if len(calls) == 2:
                raise ZeroDivisionError
            return found

        with pytest.raises(ZeroDivisionError):
            zo.step(loss, 4)
        assert same(model, Model())
        zo.step(lambda m: loss_of(m, batch(0)), 4)


def test_frozen_tensors_of_a_block_go_along():
    model = Model()
    for name, p in model.named_parameters():
        p.requires_grad_("2.weight" in name)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, zo, _ = streamed(ZerothConfig(), model)
    zo.step(lambda m: loss_of(m, batch(0)), 4)
    zo.flush()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {f"blocks.{i}.2.weight" for i in range(BLOCKS)}


def shared_blocks() -> Model:
    model = Model()
    model.blocks[2] = model.blocks[1]
    return model


def shared_with_head() -> Model:
    model = Model()
    model.head.weight = model.blocks[0][0].weight
    return model


def with_a_tensor_of_its_own() -> Model:
    model = Model()
    model.scale = nn.Parameter(torch.ones(1))
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Model(0), "no blocks to stream"),
        (shared_blocks, "block 2 shares a tensor with block 1"),
        (shared_with_head, "head shares a tensor with block 0"),
        (with_a_tensor_of_its_own, "the model has tensors of its own beside blocks"),
    ],
)
def test_what_cannot_be_streamed_is_refused(model: Callable[[], Model], message: str):
    with pytest.raises(UserError, match=message):
        streamed(ZerothConfig(), model())


def test_blocks_in_another_order_are_refused():
    model = Model()
    make = functools.partial(BlockStream, blocks=list(model.blocks)[::-1])
    zo = ZerothOrder(model, lr=0.1, make_forward=make)
    with pytest.raises(UserError, match="block 3 is called after block -1: give `blocks` in the order"):
        zo.step(lambda m: loss_of(m, batch(0)), 4)
