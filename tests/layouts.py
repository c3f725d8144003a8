"""Tiny models of both families, trained under a layout by real processes, and by one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import training.prepared  # noqa: F401, transformers imports torchvision when it is installed

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from core import CO2Config, UserError
from core.baselines.ddp import DDP
from core.buckets import is_dtensor, local_shard
from core.testing.reference import Reference
from training.layout import Layout
from training.layouts.parallel import Parallel
from training.layouts.resharded import Resharded
from training.layouts.zero import shard_optimizer

CPU = torch.device("cpu")
SAMPLES, CONTEXT, VOCABULARY, LAYERS = 16, 6, 32, 8
Trace = tuple[list[float], list[float], dict[str, Tensor]]  # losses, norms of gradients, parameters at the end


def build(kind: str) -> Any:
    """gpt2 has a tied embedding. llama has fewer heads of keys and an untied embedding, llama-tied a tied one. A kind
    with -short has half the layers, and with -two two layers. All are float64, and the same on every rank."""
    torch.manual_seed(0)
    layers = {"short": LAYERS // 2, "two": 2}.get(kind.rpartition("-")[2], LAYERS)
    if kind.startswith("gpt2"):
        sizes: dict[str, Any] = dict(n_layer=layers, n_head=8, n_embd=32, n_positions=CONTEXT, n_inner=48)
        off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **sizes, **off))
    else:
        sizes = dict(num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=8, hidden_size=64)
        config = LlamaConfig(vocab_size=VOCABULARY, use_cache=False, intermediate_size=48, **sizes)
        config.tie_word_embeddings = kind.startswith("llama-tied")
        model = LlamaForCausalLM(config)
        for module in model.modules():
            if isinstance(module, LlamaRMSNorm):  # whose own forward pass is in float32
                module.forward = MethodType(norm, module)
    with torch.no_grad():
        for p in model.parameters():  # norms and biases would begin alike, and what is mixed up among them unseen
            p.add_(0.05 * torch.randn_like(p))
    return model.double()


def norm(self: LlamaRMSNorm, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def batch(step: int, island: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and the next ones, [SAMPLES, CONTEXT], of all data-parallel workers of an island."""
    generator = torch.Generator().manual_seed(1000 * island + step)
    tokens = torch.randint(VOCABULARY, (SAMPLES, CONTEXT + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def part_of_mean(logits: Tensor, targets: Tensor, many: int) -> Tensor:
    return loss_sum(logits, targets) / many


def mean_loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return part_of_mean(model(tokens).logits, targets, targets.numel())


def one_process(kind: str, steps: int, clip: float) -> Trace:
    model = build(kind)
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), [], []
    for step in range(steps):
        optimizer.zero_grad()
        (loss := mean_loss(model, *batch(step))).backward()
        losses.append(loss.item())
        norms.append(clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
    with torch.no_grad():
        losses.append(mean_loss(model, *batch(steps)).item())
    return losses, norms, parted(model)


def parted(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a whole model's parameters, by the names that they have under a layout."""
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        p = p.detach().clone()
        conv = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        p = p.t() if conv else p
        if ".c_attn." in name:
            base, what = name.rsplit(".", 1)
            found |= {f"{base}.{key}.{what}": part for key, part in zip("qkv", p.chunk(3), strict=True)}
        else:
            found[name] = p
    return found


def whole(parallel: Any) -> dict[str, Tensor]:
    """The parameters that this rank's stage has, whole."""
    named = {name.removeprefix("model."): p.detach() for name, p in parallel.named_parameters()}
    return {name: (p.full_tensor() if is_dtensor(p) else p).clone() for name, p in named.items()}


def train(rank: int, world_size: int, kind: str, names: list[str], steps: int, clip: float) -> list[Trace]:
    """Of each layout; all take the same processes."""
    traces = []
    for name in names:
        layout = Layout.parse(name)
        parallel = Parallel(build(kind), layout, CPU)
        optimizer, losses, norms = torch.optim.AdamW(parallel.parameters(), lr=1e-2, weight_decay=0.1), [], []
        for step in range(steps):
            loss = backward(parallel, step)
            dist.all_reduce(loss, group=parallel.island)
            losses.append(loss.item() / world_size)
            norms.append(parallel.clip_gradients(clip).item())
            optimizer.step()
        losses.append(evaluated(parallel, *batch(steps)))
        traces.append((losses, norms, whole(parallel)))
    return traces


def backward(parallel: Parallel, step: int) -> Tensor:
    """The gradient of this rank's worker at a step, and its part of the loss."""
    tokens, targets = (t.chunk(parallel.layout.dp)[parallel.place.data] for t in batch(step, parallel.place.island))
    parallel.zero_grad()
    return parallel.backward(tokens, targets, partial(part_of_mean, many=targets.numel()))


@torch.no_grad()
def evaluated(parallel: Parallel, tokens: Tensor, targets: Tensor) -> float:
    """The mean loss of the island's workers on their shares, which the ranks of the last stage know."""
    layout = parallel.layout
    x, y = (t.chunk(layout.dp)[parallel.place.data] for t in (tokens, targets))
    found = parallel(x)
    assert (found is None) == (parallel.place.stage < layout.pp - 1)
    loss = torch.zeros((), dtype=torch.float64) if found is None else loss_sum(found.logits, y)
    dist.all_reduce(loss, group=parallel.island)
    return loss.item() / targets.numel() / layout.tp


def worst(traces: list[Trace], expected: Trace) -> float:
    """The largest difference of losses, norms and parameters, over the ranks; every parameter must be on some rank."""
    found: set[str] = set()
    errors: list[float] = []
    for losses, norms, params in traces:
        errors += [abs(a - b) for a, b in zip(losses + norms, expected[0] + expected[1], strict=True)]
        errors += [(p - expected[2][name]).abs().max().item() for name, p in params.items()]
        found |= params.keys()
    assert found == expected[2].keys()
    return max(errors)


# -- CO2 between islands ----------------------------------------------------------------------------------------------

LR = 0.1


def islands(
    rank: int, world_size: int, kind: str, names: list[str], config: CO2Config, steps: int
) -> list[tuple[list[dict[str, Tensor]], list[dict[str, float]]]]:
    """Of each layout the parameters of this rank's stage after each round and at the end, and the rounds' statistics;
    plain SGD."""
    found = []
    for name in names:
        parallel = Parallel(build(kind), Layout.parse(name), CPU)
        co2 = parallel.co2(config)
        trace, stats = [], []
        for step in range(steps):
            backward(parallel, step)
            sgd(parallel)
            if co2.step():
                trace.append(whole(parallel))
                stats.append(co2.stats.as_dict())
        co2.finish()
        co2.close()
        found.append(([*trace, whole(parallel)], stats))
    return found


@torch.no_grad()
def sgd(model: nn.Module) -> None:
    for p in model.parameters():
        local_shard(p).sub_(LR * local_shard(p.grad))


def reference(kind: str, config: CO2Config, steps: int, many: int = 2) -> list[dict[str, Tensor]]:
    """The same by core.testing.reference, in this process."""
    model = build(kind)
    params = list(model.parameters())
    rows = torch.nn.utils.parameters_to_vector(params).detach().expand(many, -1).clone()
    assert isinstance(config.tau, int)
    ref = Reference(rows, config.tau, config.outer_lr, config.outer_momentum, config.gap, config.clip)

    def gradient(rows: Tensor, step: int) -> Tensor:
        found = []
        for island, row in enumerate(rows):
            torch.nn.utils.vector_to_parameters(row, params)
            model.zero_grad()
            mean_loss(model, *batch(step, island)).backward()
            found.append(torch.cat([p.grad.flatten() for p in params]))
        return torch.stack(found)

    ref.run(gradient, LR, steps)
    rounds = ref.outer[1:]
    ref.finish()
    trace = []
    for x in [*rounds, ref.x[0]]:
        torch.nn.utils.vector_to_parameters(x.clone(), params)
        trace.append(parted(model))
    return trace


def difference(results: list[list[dict[str, Tensor]]], expected: list[dict[str, Tensor]]) -> float:
    """The largest, over the ranks and rounds; every parameter must be on some rank."""
    assert set().union(*(trace[0] for trace in results)) == expected[0].keys()
    assert all(len(trace) == len(expected) for trace in results)
    pairs = [pair for trace in results for pair in zip(trace, expected, strict=True)]
    return max((p - whole[name]).abs().max().item() for ours, whole in pairs for name, p in ours.items())


# -- from one layout to another ---------------------------------------------------------------------------------------


def chained(
    rank: int, world_size: int, kind: str, names: list[str], config: CO2Config | None, steps: int, folder: Path
) -> dict[str, Tensor]:
    """The parameters of this rank's stage at the end of a run that goes on under the next layout every `steps` steps,
    each from the checkpoint of the one before. config: None without CO2."""
    for number, name in enumerate(names):
        layout = Layout.parse(name)
        model = build(kind)
        for p in model.parameters() if number else ():
            p.data.zero_()  # what is not loaded shows
        parallel = Parallel(model, layout, CPU)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        optimizer = shard_optimizer(optimizer, parallel.mesh, 1) if layout.zero == 1 else optimizer
        method = parallel.co2(config) if config else DDP(parallel, synchronous=True)
        held = Resharded(parallel, optimizer, method)
        others = held.load(folder) if number else {"step": 0}
        assert others is not None and others["step"] == number * steps
        for step in range(others["step"], others["step"] + steps):
            backward(parallel, step)
            parallel.clip_gradients(0.5)
            optimizer.step()
            method.step()
        assert held.save(folder, (number + 1) * steps, "a", {"step": (number + 1) * steps})
        method.finish()  # with keep_local, islands differ until then
        last = whole(parallel)
        dist.barrier()
        method.close()
    return last


def one_step(parallel: Parallel, optimizer: torch.optim.Optimizer, method: Any, step: int) -> None:
    backward(parallel, step)
    optimizer.step()
    method.step()


def resliced(
    rank: int, world_size: int, names: list[str], of_one: str, momentum: float, folder: Path
) -> tuple[list[tuple[dict[str, Tensor], float]], str]:
    """Of a run with a fragment's all-reduce in flight under one layout, and of its resume under another: the parameters
    if it ends there, and the sum of squares of the island's momentum, as its fragments hold it. And what a layout of
    islands of one device says to it."""
    late: dict[str, Any] = {"gap": "none", "merge": "keep_local", "delay": "auto"}
    config = CO2Config(6, outer_lr=0.5, outer_momentum=momentum, fragments=3, **late)
    found, said = [], ""
    for name in [*names, of_one]:
        parallel = Parallel(build("gpt2-two"), Layout.parse(name), CPU)
        co2 = parallel.co2(replace(config, fragments="auto") if found else config)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        held = Resharded(parallel, optimizer, co2)
        try:
            assert held.load(folder) or not found
        except UserError as error:
            said = str(error)
        for step in range(0 if found else 12):
            one_step(parallel, optimizer, co2, step)
        if not found:
            assert co2.allreduce.in_flight and held.save(folder, 12, "a", {"step": 12})
        if name != of_one:
            held_by = [fragment.numbers for fragment in co2.fragments]
            dist.all_reduce(squares := torch.stack(held_by)[:, 1].sum(), group=parallel.island)
            one_step(parallel, optimizer, co2, 12)  # without one, finish() has nothing to send
            co2.finish()
            found.append((whole(parallel), squares.item()))
        dist.barrier()
        co2.close()
    return found, said
