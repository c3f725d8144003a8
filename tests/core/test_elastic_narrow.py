"""Checkpoints and states of workers that come and go, over narrow formats and fragments."""

import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from core import CO2, CO2Config, CompressionConfig
from core.elastic import elastic_co2
from core.elastic.members import Members, WorkersChanged

MEMBERS = Members(HashStore(), "0.0")


def test_a_newcomer_counts_the_all_reduces_of_fragments_that_are_gone():
    """Its next all-reduce has the others' number, also if automatic fragments have become one again."""
    settings = CO2Config.recommended(tau=6)
    here, newcomer = (elastic_co2([nn.Parameter(torch.zeros(5))], settings, members=MEMBERS) for _ in range(2))
    here.allreduce.launched, here.rounds = 9, 4
    newcomer.load_state_dict(here.state_dict())
    assert newcomer.allreduce.launched == 9 and newcomer.rounds == 4


def test_checkpoints_go_both_ways_without_residuals():
    """Checkpoints of a run of one worker, too, whose residuals would have the same shapes."""
    config = CO2Config(tau=3, compression=CompressionConfig("int4"))
    plain = CO2([nn.Parameter(torch.ones(5))], config)
    elastic = elastic_co2([nn.Parameter(torch.zeros(5))], config, members=MEMBERS)
    for flats in plain.reducer.state.values():
        flats[0].fill_(1.0)
    elastic.load_state_dict(plain.state_dict())
    assert elastic._x[0].tolist() == [1.0] * 5 and not any(f[0].any() for f in elastic.reducer.state.values())
    CO2([nn.Parameter(torch.zeros(5))], config).load_state_dict(elastic.state_dict())


def test_a_sum_that_others_have_lost_is_repeated():
    """A worker that comes late to the sum would otherwise add it to another sum of the others."""
    allreduce = elastic_co2([nn.Parameter(torch.zeros(5))], CO2Config.paper(3), members=MEMBERS).allreduce
    allreduce.lost["summed"].add(1)
    with pytest.raises(WorkersChanged):
        allreduce.sum_of_all(torch.zeros(1))
    assert allreduce.summed == 1
