"""Documents split over the ranks of an island: a model's step, and CO2 across two islands, beside whole documents."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from core import CO2, CO2Config
from core.testing import run_distributed
from core.testing.reference import Reference
from language.lengths.packed import attend_to_documents
from language.lengths.plan import Island, plan
from tests.problems import assert_traces_equal, flat
from tests.tiny_models import CONFIGS
from training.layouts.ring import Shares, ring_attention

VOCABULARY, IGNORED = 50, -100
LENGTHS = [100, 37, 5, 1, 60, 3]
RINGS = {
    "all ranks": [(2, 0, 3, 1), (1, 3), (0,), (2,), (3, 2, 1), (0, 1, 2, 3)],
    "one rank with a filler alone": [(2, 0, 1), (1, 0), (0,), (2,), (2, 1), (0, 1)],
}


def documents(step: int = 0, lengths: list[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths]


def following(document: Tensor) -> Tensor:
    """Each token's target; the last one has none."""
    return torch.cat([document[1:], document.new_full((1,), IGNORED)])


def shared(whole: list[Tensor], rings: list[tuple[int, ...]], ranks: int, **group) -> tuple[Tensor, Tensor, Shares]:
    """Ids and targets of this rank's tokens, [tokens]; a rank without any gets a document of one token."""
    idle = sorted(set(range(ranks)) - {rank for ring in rings for rank in ring})
    whole, rings = [*whole, *(torch.zeros(1, dtype=torch.int64) for _ in idle)], [*rings, *((rank,) for rank in idle)]
    shares = Shares(torch.tensor([0, *map(len, whole)]).cumsum(0), rings, **group)
    targets = torch.cat([following(document) for document in whole])
    return torch.cat(whole)[shares.indices], targets[shares.indices], shares


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


# -- GPT-2 ------------------------------------------------------------------------------------------------------------


def build(kind: str) -> nn.Module:
    """gpt2, or a llama with fewer heads of keys and a scale of scores of its own; float64, without dropout."""
    from language.model import build_model

    torch.manual_seed(0)
    if kind == "gpt2":
        return build_model("gpt2_tiny", vocab_size=VOCABULARY, context=100, dropout=0.0).double()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).double().train()
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.7
    return model


def steps_in_rings(rank: int, ranks: int, kinds: tuple[str, ...]) -> list[Tensor]:
    """For each model and each of RINGS the loss and all gradients, [1 + parameters]."""
    results = []
    for kind in kinds:
        model = build(kind)
        attend_to_documents(model, split=True)
        for rings in RINGS.values():
            model.zero_grad()
            ids, targets, shares = shared(documents(), rings, ranks)
            logits = model(ids[None], position_ids=shares.positions[None], documents=shares).logits[0]
            loss = summed(logits, targets) / sum(n - 1 for n in LENGTHS)
            loss.backward()
            result = torch.cat([loss.detach().reshape(1), *(p.grad.reshape(-1) for p in model.parameters())])
            dist.all_reduce(result)
            results.append(result)
    return results


@pytest.mark.slow  # four processes import transformers
def test_a_step_on_four_ranks_is_that_of_one_process():
    expected, total = [], sum(n - 1 for n in LENGTHS)
    for kind in (kinds := ("gpt2", "llama")):
        model = build(kind)
        loss = sum(summed(model(d[None]).logits[0], following(d)) for d in documents()) / total
        loss.backward()
        whole = torch.cat([loss.detach().reshape(1), *(p.grad.reshape(-1) for p in model.parameters())])
        expected += [whole] * len(RINGS)
    for results in run_distributed(steps_in_rings, 4, kinds, timeout=120):
        for result, whole in zip(results, expected, strict=True):
            torch.testing.assert_close(result, whole, rtol=1e-10, atol=1e-10)


# -- CO2 across two islands of two ------------------------------------------------------------------------------------

TAU, STEPS, LR = 3, 11, 0.5
TWO = Island(1, 2, attention=1.0, linear=1.0, inside=(0.0, 0.0), across=(0.0, 0.0))
SETTINGS = CO2Config(tau=TAU, outer_momentum=0.3, outer_lr=0.8, clip=0.05)


class OneLayer(nn.Module):
    """Causal attention of 2 heads over embeddings; ids [tokens] -> logits [tokens, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 48)
        self.head = nn.Linear(16, VOCABULARY)
        self.double()

    def forward(self, ids: Tensor, shares: Shares | None) -> Tensor:
        """shares None: the ids are one whole document."""
        x = self.embed(ids)
        q, k, v = self.mix(x).view(-1, 3, 2, 8).unbind(1)
        if shares is not None:
            attended = ring_attention(q, k, v, shares)
        else:
            heads_first = (t.transpose(0, 1) for t in (q, k, v))
            attended = F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(0, 1)
        return self.head(x + attended.reshape(-1, 16))


def lengths_of(island: int, step: int) -> list[int]:
    return [20 + 7 * island + step, 3, 1 + step % 3]


def train_in_islands(rank: int, ranks: int) -> list[Tensor]:
    """Ranks 0 and 1 are an island, 2 and 3 the other; the parameters after each round and after finish()."""
    islands, across = ([dist.new_group(r) for r in pairs] for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    island, inside, model = rank // 2, rank % 2, OneLayer()
    method = CO2(model.parameters(), SETTINGS, group=across[inside])
    trace = []
    for step in range(STEPS):
        whole = documents(100 * island + step, lengths_of(island, step))
        rings = plan(torch.tensor([0, *map(len, whole)]).cumsum(0), TWO)
        assert rings[0] == (0, 1)
        ids, targets, shares = shared(whole, rings, 2, group=islands[island])
        model.zero_grad()
        summed(model(ids, shares), targets).div(sum(map(len, whole))).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=islands[island])
            p.data.sub_(LR * p.grad)
        if method.step():
            trace.append(flat(model.parameters()))
    method.finish()
    method.close()
    return [*trace, flat(model.parameters())]


def gradients(x: Tensor, step: int) -> Tensor:
    """Of whole documents, x [islands, n] -> the same."""
    rows, model = [], OneLayer()
    for island, row in enumerate(x):
        nn.utils.vector_to_parameters(row, model.parameters())
        whole = documents(100 * island + step, lengths_of(island, step))
        model.zero_grad()
        loss = sum(summed(model(d, None), following(d)) for d in whole)
        (loss / sum(map(len, whole))).backward()
        rows.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    return torch.stack(rows)


def test_co2_across_islands_that_split_their_documents_is_the_reference():
    c = SETTINGS
    x = flat(OneLayer().parameters()).expand(2, -1).clone()
    reference = Reference(x, c.tau, c.outer_lr, c.outer_momentum, c.gap, c.clip)
    reference.run(gradients, LR, STEPS)
    rounds = [rows[0] for rows in reference.restarts]
    reference.finish()
    for trace in run_distributed(train_in_islands, 4, timeout=120):
        assert_traces_equal(trace, [*rounds, reference.x[0]])
