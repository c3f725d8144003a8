"""Blocks that pass through the device one at a time: the same losses and weights."""

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from core import UserError
from core.testing import run_distributed
from language.zeroth import ZerothConfig, ZerothOrder
from language.zeroth.blocks import BlockStream

BLOCKS = 4


class Model(nn.Module):
    """An embedding and a head that share their weight, a norm, and blocks that are a little unlike."""

    def __init__(self, blocks: int = BLOCKS, norms: int = 1):
        super().__init__()
        torch.manual_seed(3)
        self.norms = norms  # 2: one between the blocks, too
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 10 + i), nn.Tanh(), nn.Linear(10 + i, 8)) for i in range(blocks)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = x + block(x)
            x = self.norm(x) if self.norms == 2 and i == 1 else x
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


def both_step(step: int, zo: ZerothOrder, whole: ZerothOrder, within: Callable = contextlib.nullcontext) -> None:
    """The same losses, in two micro-batches: two sweeps over the blocks."""
    ids = batch(10 * step + zo.place.data_rank)

    def loss(m: nn.Module) -> Tensor:
        with within():
            return sum(loss_of(m, part) for part in ids.chunk(2)) / 2  # pyright: ignore[reportReturnType]

    assert (whole.step(loss, 4), whole.own_loss) == (zo.step(loss, 4), zo.own_loss), step


def one_step(step: int, *orders: ZerothOrder) -> None:
    for zo in orders:
        zo.step(lambda m: loss_of(m, batch(step)), 4)


def compared(rank: int, world_size: int, config: ZerothConfig, blocks: int = BLOCKS, norms: int = 1) -> bool:
    plain = Model(blocks, norms)
    whole = ZerothOrder(plain, config, lr=0.1, timeout=60)
    model, zo, _ = streamed(config, Model(blocks, norms))
    for step in range(5):
        both_step(step, zo, whole)
        assert not same(model, plain), "put off until the blocks come by"
        if step == 3:
            zo.finish()
            assert same(model, plain), "deferred and flushed is immediate"
    whole.finish()
    zo.finish()
    whole.close()
    zo.close()
    return same(model, plain)


@pytest.mark.parametrize("shape", [(BLOCKS, 1), (1, 1), (2, 1), (4, 2)])
def test_streamed_blocks_give_the_same_bits(shape: tuple[int, int]):
    """Any number of blocks, also with a norm between them."""
    assert compared(0, 1, ZerothConfig(), *shape)


def test_streamed_blocks_give_the_same_bits_in_a_pair():
    assert run_distributed(compared, 2, ZerothConfig()) == [True, True]


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_mixes_up_neither_passes_nor_steps(outside: bool):
    """It keeps a parameter's cast, whatever the parameter's data are; and is a thread's own."""
    half, config = functools.partial(torch.autocast, "cpu", torch.bfloat16), ZerothConfig(eps=0.1)
    plain = Model()
    whole, (model, zo, _) = ZerothOrder(plain, config, lr=0.1), streamed(config)
    with half(enabled=outside):
        loss_of(plain, batch(0))
        for step in range(3):
            both_step(step, zo, whole, contextlib.nullcontext if outside else half)
    zo.finish()
    assert same(model, plain)
    exact = ZerothOrder(Model(), config, lr=0.1)
    exact.step(lambda m: loss_of(m, batch(0)), 4)
    assert exact.log.g[0] == pytest.approx(whole.log.g[0], rel=0.2) and exact.log.g[0] != whole.log.g[0]
    assert torch.is_autocast_cache_enabled()


def test_weights_that_are_loaded_between_two_steps_are_taken():
    """Though the first block was on its way to the device before."""
    plain = Model()
    whole, (model, zo, _) = ZerothOrder(plain, lr=0.0), streamed(ZerothConfig())
    zo.lr = 0.0
    both_step(0, zo, whole)
    changed = {name: 2 * t for name, t in plain.state_dict().items()}
    for net in (plain, model):
        net.load_state_dict(changed)
    both_step(1, zo, whole)
    assert same(model, plain) and abs(zo.log.g[1]) > 0


def test_between_steps_the_model_computes_with_all_that_was_put_off():
    plain = Model()
    whole, (model, zo, stream) = ZerothOrder(plain, lr=0.1), streamed(ZerothConfig())
    both_step(0, zo, whole)
    assert not same(model, plain)
    uploaded = stream.window.upload.bytes
    with zo.averaged_model(), whole.averaged_model():
        for _ in range(2):
            assert torch.equal(loss_of(model, batch(7)), loss_of(plain, batch(7)))
    assert stream.window.upload.bytes - uploaded == 2 * sum(b.nbytes for b in stream.blocks)
    with pytest.raises(ZeroDivisionError), zo.averaged_model():
        hook = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
        model(batch(0))
    hook.remove()
    both_step(1, zo, whole)
    zo.finish()
    assert same(model, plain)


def test_a_pass_uploads_each_block_once_and_a_step_offloads_it_once():
    _, zo, stream = streamed(ZerothConfig())
    each = [block.nbytes for block in stream.blocks]
    for step in range(3):
        one_step(step, zo)
    assert stream.window.upload.bytes == 3 * 2 * sum(each)
    assert stream.window.offload.bytes == 2 * sum(each), "in the first step nothing had changed"


def test_a_run_resumes_where_updates_were_put_off():
    (model, zo, _), (other, resumed, _) = streamed(ZerothConfig()), streamed(ZerothConfig())
    plain = Model()
    whole = ZerothOrder(plain, lr=0.1)
    for step in range(3):
        one_step(step, zo)
    state = zo.state_dict()
    assert len(state["pending"]) == 1
    for each, net in ((resumed, other), (whole, plain)):
        net.load_state_dict(model.state_dict())
        each.load_state_dict(state)
    for step in range(3, 6):
        one_step(step, zo, resumed, whole)
    for each in (zo, resumed, whole):
        each.finish()
    assert same(model, other) and same(model, plain)


def test_an_update_that_was_put_off_is_there_after_a_loss_that_fails():
    """A block takes it when it comes by: here in the first of two passes, and the second never comes."""

    def fails(m: Model) -> Tensor:
        inside = m.blocks[1][0].register_forward_hook(lambda *_: 1 // 0)
        try:
            return loss_of(m, batch(1))
        finally:
            inside.remove()

    (model, zo, _), (other, plain, _) = streamed(ZerothConfig()), streamed(ZerothConfig())
    for one in (zo, plain):
        one_step(0, one)
    with pytest.raises(ZeroDivisionError):
        zo.step(fails, 4)
    with pytest.raises(IndexError):
        zo.step(lambda m: loss_of(m, batch(0) + 20), 4)  # in the embedding, which is perturbed meanwhile
    for one in (zo, plain):
        one.finish()
    assert same(model, other)


def test_frozen_tensors_of_a_block_go_along():
    model = Model()
    for name, p in model.named_parameters():
        p.requires_grad_("2.weight" in name)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, zo, _ = streamed(ZerothConfig(), model)
    one_step(0, zo)
    zo.finish()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {f"blocks.{i}.2.weight" for i in range(BLOCKS)}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m.blocks.__delitem__(slice(None)), "no blocks to stream"),
        (lambda m: m.blocks.__setitem__(2, m.blocks[1]), "block 2 shares a tensor with block 1"),
        (lambda m: setattr(m.head, "weight", m.blocks[0][0].weight), "head shares a tensor with block 0"),
    ],
)
def test_what_cannot_be_streamed_is_refused(spoil: Callable[[Model], None], message: str):
    spoil(model := Model())
    with pytest.raises(UserError, match=message):
        streamed(ZerothConfig(), model)


def test_blocks_in_another_order_are_refused():
    model = Model()
    make = functools.partial(BlockStream, blocks=list(model.blocks)[::-1])
    zo = ZerothOrder(model, lr=0.1, make_forward=make)
    with pytest.raises(UserError, match="block 3 is called after block -1: give `blocks` in the order"):
        one_step(0, zo)
