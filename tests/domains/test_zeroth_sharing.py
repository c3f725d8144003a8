"""Workers of a node upload a part of each block, and send it to each other."""

from datetime import timedelta

import torch
import torch.distributed as dist

from core import CollectiveError, UserError
from core.testing import run_distributed
from language.zeroth import ZerothConfig, ZerothOrder
from tests.domains.test_zeroth_blocks import Model, batch, both_step, loss_of, same, streamed


def sharing(rank: int, world_size: int) -> list[tuple[bool, list[int]]]:
    """By config, whether the weights are as without sharing; bytes uploaded in two steps, and those of each block."""
    return [shared(rank, world_size, c) for c in (ZerothConfig(), ZerothConfig(pairs=False))]


def shared(rank: int, world_size: int, config: ZerothConfig) -> tuple[bool, list[int]]:
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=60))
    plain = Model()
    whole = ZerothOrder(plain, config, lr=0.1, timeout=60)
    model, zo, stream = streamed(config, share=group)
    for step in range(4):
        both_step(step, zo, whole)
        if step == 1:
            with zo.inference():
                alike = [torch.equal(model(batch(9)), plain(batch(9))) for _ in range(rank)]  # unequally many
            assert all(alike)
            before = stream.window.upload.bytes
    zo.finish()
    whole.close()
    zo.close()
    return same(model, plain), [stream.window.upload.bytes - before, *(b.nbytes for b in stream.blocks)]


def test_workers_of_a_node_upload_a_part_each():
    """Two steps of two sweeps, and the third step's first block."""
    for found in run_distributed(sharing, 3):
        for alike, (uploaded, first, *rest) in found:
            assert alike
            sweeps = 4
            assert 3 * uploaded == sweeps * (first + sum(rest)) + first


def one_has_no_samples(rank: int, world_size: int) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    _, zo, _ = streamed(ZerothConfig(pairs=False), share=group)
    try:
        zo.step(lambda m: loss_of(m, batch(0)), 4 * rank)
    except (UserError, CollectiveError) as error:
        return str(error)
    return ""


def test_a_worker_that_shares_uploads_must_measure():
    first, second = run_distributed(one_has_no_samples, 2, expect_death=(0, 1))
    assert first.startswith("count=0: a worker that shares uploads measures at every step")
    assert second.startswith("rank 1: ")
