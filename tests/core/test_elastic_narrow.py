"""Workers that come and go over narrow formats: what a lost worker leaves, and what the survivors send again."""

import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from core import CO2, CO2Config, CompressionConfig
from core.buckets import Scalars, make_buckets
from core.elastic import elastic_co2
from core.elastic.members import Members
from core.elastic.reducers import ElasticQuantized
from core.local_update import OWN_SCALARS

INT4 = CompressionConfig("int4")
MEMBERS = Members(HashStore(), "0.0")
NUMEL = 1500  # six blocks, the last of which is not full


class Sender:
    """One worker's bucket and reducer. The collectives between them are in `attempt`."""

    def __init__(self, rank: int):
        self.seed, self.scalars = rank, Scalars(OWN_SCALARS)
        self.bucket = make_buckets([nn.Parameter(torch.zeros(NUMEL, dtype=torch.float64))], [], 3)[0]
        self.scalars.attach(self.bucket.scalars)
        self.reducer = ElasticQuantized([self.bucket], self.scalars, INT4)

    def launch(self, rank: int, size: int, payload: torch.Tensor, *, again: bool = False) -> None:
        if not again:
            self.bucket.payload.copy_(payload)
            self.bucket.scalars.fill_(1.0)
        else:
            self.reducer.undo()
        self.reducer.begin(rank, size, size)

    @property
    def sums(self) -> torch.Tensor:
        return self.reducer.copies[0].flat

    def residuals(self) -> torch.Tensor:
        """What it owes to the sum over the workers."""
        own, mean = (flats[0] for flats in self.reducer.state.values())
        owed, at = own.clone(), self.reducer.attempt
        owed[at.rank * len(mean) : (at.rank + 1) * len(mean)] += at.world_size * mean
        return owed[: self.bucket.numel]


def attempt(senders: list[Sender], steps: int = 3) -> torch.Tensor:
    """The first steps of a reduction: encode, average, decode. The average counts after the last."""
    sent = [sender.reducer.attempt._outgoing() for sender in senders]
    if steps > 1:
        means = [s.reducer.attempt._average(torch.stack([row[j] for row in sent])) for j, s in enumerate(senders)]
        for sender in senders if steps > 2 else []:
            sender.reducer.attempt._unpack(torch.stack(means))
    if steps == 3:
        assert all(torch.equal(senders[0].sums, sender.sums) for sender in senders)
    return senders[0].sums[: senders[0].bucket.numel].clone()


def payload(seed: int, number: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * seed + number), dtype=torch.float64)


def rounds(senders: list[Sender], numbers: range) -> torch.Tensor:
    """The sum of these rounds' averages, over so many workers."""
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for number in numbers:
        for rank, sender in enumerate(senders):
            sender.launch(rank, len(senders), payload(sender.seed, number))
        total += attempt(senders)
    return total


@pytest.mark.parametrize("lost_after", [0, 1, 2, 3])
def test_a_change_loses_nothing_of_a_survivor(lost_after: int):
    """Three of four workers go on. Worker 1 is lost before the fifth round, or after attempts at it that fail."""
    senders = [Sender(rank) for rank in range(4)]
    rounds(senders, range(4))
    left = [sender for sender in senders if sender.seed != 1]
    factor = 3 / 4  # a residual of averages weighs as many workers as the next average is over
    owed = torch.zeros(NUMEL, dtype=torch.float64)
    for sender in left:
        own = sender.reducer.state["error_feedback"][0][:NUMEL]
        owed += own + factor * (sender.residuals() - own)
    if lost_after:
        for steps in range(1, lost_after + 1):
            for rank, sender in enumerate(senders):
                sender.launch(rank, 4, payload(sender.seed, 4), again=steps > 1)
            attempt(senders, steps)
        for rank, sender in enumerate(left):
            sender.launch(rank, 3, payload(sender.seed, 4), again=True)
        total = attempt(left) + rounds(left, range(5, 8))
    else:
        total = rounds(left, range(4, 8))
    sent = torch.stack([payload(sender.seed, number) for sender in left for number in range(4, 8)]).sum(0)
    still = torch.stack([sender.residuals() for sender in left]).sum(0)
    torch.testing.assert_close(3 * total + still, owed + sent, rtol=0, atol=1e-9)
    assert still.abs().max() < 3 * 2 * 4 / 7, "of each stage at most half a quantum"


def test_a_newcomer_counts_the_all_reduces_of_fragments_that_are_gone():
    """Its next all-reduce has the others' number, also if automatic fragments have become one again."""
    settings = CO2Config.recommended(tau=6)
    here, newcomer = (elastic_co2([nn.Parameter(torch.zeros(5))], settings, members=MEMBERS) for _ in range(2))
    here.allreduce.launched, here.rounds = 9, 4
    newcomer.load_state_dict(here.state_dict())
    assert newcomer.allreduce.launched == 9 and newcomer.rounds == 4


def test_checkpoints_go_both_ways_without_residuals():
    """Checkpoints of a run of one worker, too, whose residuals would have the same shapes."""
    config = CO2Config(tau=3, compression=INT4)
    plain = CO2([nn.Parameter(torch.ones(5))], config)
    elastic = elastic_co2([nn.Parameter(torch.zeros(5))], config, members=MEMBERS)
    for flats in plain.reducer.state.values():
        flats[0].fill_(1.0)
    elastic.load_state_dict(plain.state_dict())
    assert elastic._x[0].tolist() == [1.0] * 5 and not any(f[0].any() for f in elastic.reducer.state.values())
    CO2([nn.Parameter(torch.zeros(5))], config).load_state_dict(elastic.state_dict())
