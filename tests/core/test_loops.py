"""CO2 and the other methods in the training loops that people write: each must train exactly as in the plain one.

Where two loops do the same operations in the same order, they are compared bit for bit; where one adds the same numbers
in another order, float64 leaves them equal up to the last digits, and 1e-9 is allowed. A loop that ought to train
otherwise is compared, too: it must differ, or the comparison would see nothing.
"""

import copy
from collections import defaultdict
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from core import CO2, CO2Config, WireConfig, make_method
from core.testing import run_distributed
from tests import problems

TAU, STEPS = 3, 11  # the last round is not full
SAVE_AT = (1, 5, 9)  # before the first boundary, at one, and mid-round
CONFIG = CO2Config(tau=TAU, outer_momentum=0.4, outer_lr=0.9, clip=0.05)
NAMES = ("co2", "local", "slowmo", "overlap_local")
SLOW_LINK = problems.SlowLink(0.04)  # one can look at what is under way
batch = partial(problems.batch, size=8)
sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=1e-2)


def net(seed: int = 0, frozen: bool = False) -> nn.Sequential:
    """A net with BatchNorm, so that a forward pass in training mode leaves traces. frozen: its first layer is."""
    torch.manual_seed(seed)
    first = nn.Linear(6, 5).requires_grad_(not frozen)
    return nn.Sequential(first, nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


class Parts(NamedTuple):
    """What a loop is made of, in the order in which a checkpoint is loaded."""

    model: nn.Module
    optimizer: Any
    method: Any


def build(name: str, model: Any, *, optimizer: Any = None, given: Any = None, **options: Any) -> Parts:
    """given: the module that the method gets, where that is not the model itself."""
    optimizer = optimizer or sgd(model.parameters())
    options = {"co2": CONFIG, "lr": lambda: optimizer.param_groups[0]["lr"]} | options
    return Parts(model, optimizer, make_method(name, given or model, **options)[1])


def everything(model: nn.Module) -> Tensor:
    return problems.flat([*model.parameters(), *model.buffers()])


def train(parts: Parts, rank: int, steps: range = range(STEPS), **hooks: Any) -> Tensor:
    """The plain loop. Returns all parameters and buffers after every step and after finish(), [steps + 1, n].

    hooks: `ready` is called when the gradients are there, `stepped` before the method's step, `look` after it.
    """
    model, optimizer, method = parts
    hooks, trace = defaultdict(lambda: lambda *_: None, hooks), []
    for step in steps:
        problems.loss(model, batch(rank, step)).backward()
        hooks["ready"]()
        optimizer.step()
        optimizer.zero_grad()
        hooks["stepped"]()
        method.step()
        hooks["look"](parts, step)
        trace.append(everything(model))
    return ended(parts, trace)


def ended(parts: Parts, trace: list[Tensor]) -> Tensor:
    """The trace of a loop, with what finish() leaves as its last row, [steps + 1, n]."""
    parts.method.finish()
    parts.method.close()
    return torch.stack([*trace, everything(parts.model)])


def check(traces: dict[str, Tensor], differ: tuple[str, ...] = (), tolerance: float = 0.0) -> None:
    """The first trace is the plain loop's: those named in `differ` must be visibly different, all others equal."""
    plain = next(iter(traces.values()))
    for name, trace in traces.items():
        apart = (trace - plain[-len(trace) :]).abs().max().item()  # a resumed run has the last steps only
        assert apart > 1e-4 if name in differ else apart <= tolerance, f"{name}: {apart} from the plain loop"


def note(seen: set[str], method: Any, step: int) -> None:
    """Notes where in a round an all-reduce was found that had been launched and had not landed."""
    if method.flight.in_flight and not method.flight.done():
        seen.add("mid-round" if (step + 1) % TAU else "boundary")


def evaluations(rank: int, world_size: int) -> None:
    """After every step. They only read, so bit for bit; in training mode they would move BatchNorm's statistics."""

    def evaluate(seen: set[str], mode: bool, parts: Parts, step: int) -> None:
        note(seen, parts.method, step)
        parts.model.train(mode)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                parts.model(batch(7, step)[0])
        parts.model.train()

    for name in NAMES:
        traces, seen = {"plain": train(build(name, net()), rank)}, set()
        for loop, mode in (("evaluated", False), ("without eval()", True)):
            traces[loop] = train(build(name, net(), link=SLOW_LINK), rank, look=partial(evaluate, seen, mode))
        check(traces, differ=("without eval()",))
        assert seen == ({"boundary", "mid-round"} if name in ("co2", "overlap_local") else set()), name


def checkpoints(rank: int, world_size: int) -> None:
    """Bit for bit: what flies is saved as the sum that lands. The inner gap and narrow wires keep a state, too."""
    seen, saved = set(), {}

    def save(parts: Parts, step: int) -> None:
        if step in SAVE_AT:
            note(seen, parts.method, step)
            saved[step] = copy.deepcopy([part.state_dict() for part in parts])

    narrow = CO2Config(TAU, wire=WireConfig("int4"))
    wired = [("co2", CO2Config(TAU, wire=WireConfig("int8"))), ("local", narrow), ("overlap_local", narrow)]
    for name, config in (*product(NAMES, [CONFIG]), *wired):
        traces = {"plain": train(build(name, net(), co2=config), rank)}
        traces["saved"] = train(build(name, net(), co2=config, link=SLOW_LINK), rank, look=save)
        for step, count in (*product(SAVE_AT, [3]), (9, 2)):
            fresh = build(name, net(1 + rank), co2=config)
            for part, state in zip(fresh[:count], saved[step][:count], strict=True):
                part.load_state_dict(state)
            traces[f"{count} parts after {step}"] = train(fresh, rank, range(step + 1, STEPS))
        check(traces, differ=("2 parts after 9",))
    assert seen == {"boundary", "mid-round"}


class Trainer(NamedTuple):
    """Calls hooks, as a framework's trainer does, and passes a closure to the optimiser. micro: over how many batches
    gradients are added. limit: of their norm. zero, method: the hooks that zero them and call the method's step."""

    parts: Parts
    micro: int = 1
    limit: float = 0.1
    zero: str = "after"
    set_to_none: bool = True
    method: str = "batch end"

    def hook(self, name: str) -> None:
        if name == self.zero:
            self.parts.optimizer.zero_grad(self.set_to_none)
        if name == self.method:
            self.parts.method.step()

    def training_step(self, data: Any, last: bool) -> Tensor:
        loss = problems.loss(self.parts.model, data) / self.micro
        loss.backward()
        self.hook("backward")
        if last:
            nn.utils.clip_grad_norm_(self.parts.model.parameters(), self.limit)
        return loss

    def fit(self, rank: int) -> Tensor:
        self.parts.optimizer.register_step_post_hook(lambda *_: self.hook("optimiser"))
        trace = []
        for step in range(STEPS):
            *first, last = zip(*(t.chunk(self.micro) for t in batch(rank, step)), strict=True)
            for data in first:
                self.training_step(data, last=False)
            self.parts.optimizer.step(partial(self.training_step, last, last=True))
            for name in ("before", "batch end", "after"):
                self.hook(name)
            trace.append(everything(self.parts.model))
        return ended(self.parts, trace)


def trainers(rank: int, world_size: int) -> None:
    """Hooks leave the order of all operations as it is, so bit for bit. Accumulation adds a batch's gradients in
    another order; it is tested without BatchNorm, which would see other batches."""
    hooks: dict[str, Any] = {f"{z} {n}": {"zero": z, "set_to_none": n} for z in ("before", "after") for n in (0, 1)}
    hooks |= {"optimiser": {"method": "optimiser"}, "never": {"zero": "never"}, "no limit": {"limit": 1e9}}
    micro: dict[str, Any] = {"accumulated": {"micro": 4}, "a step each": {"micro": 4, "method": "backward"}}
    for name, model, variants in (("co2", net, hooks), *product(NAMES, [problems.small_net], [micro])):
        parts = build(name, model())
        clip = partial(nn.utils.clip_grad_norm_, list(parts.model.parameters()), Trainer(parts).limit)
        traces = {"plain": train(parts, rank, ready=clip)}
        traces |= {k: Trainer(build(name, model()), **v).fit(rank) for k, v in variants.items()}
        check(traces, differ=("never", "no limit", "a step each"), tolerance=0.0 if model is net else 1e-9)


class ByHand(torch.optim.Optimizer):
    """SGD with momentum, numbers of their own for weights and biases, and a learning rate that falls every step."""

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        group = self.param_groups[0]
        for p in group["params"]:
            share, decay = (1, 0.05) if p.dim() > 1 else (1 / 3, 0.0)
            velocity = self.state[p]["velocity"] = 0.9 * self.state[p].get("velocity", 0) + p.grad + decay * p
            p -= share * group["lr"] * velocity
        group["lr"] *= 0.9


def groups_and_schedules(rank: int, world_size: int) -> None:
    """By hand, products are rounded in another order. SlowMo divides by the learning rate of now, so that a schedule
    which steps after it is another training; no other method sees when the schedule steps."""
    for name in NAMES:
        model = net()
        traces = {"by hand": train(build(name, model, optimizer=ByHand(model.parameters(), {"lr": 0.3})), rank)}
        for loop, factor in (("both", 0.9), ("late", 0.9), ("one group", 0.9), ("constant", 1.0)):
            model = net()
            weights, biases = ([p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
            two = [{"params": weights, "weight_decay": 0.05}, {"params": biases, "lr": 0.1, "weight_decay": 0.0}]
            optimizer = sgd(model.parameters() if loop == "one group" else two)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, factor)
            when: Any = {"look": lambda *_, s=schedule: s.step()} if loop == "late" else {"stepped": schedule.step}
            traces[loop] = train(build(name, model, optimizer=optimizer), rank, **when)
        check(traces, ("one group", "constant") + ("late",) * (name == "slowmo"), tolerance=1e-9)
        assert torch.equal(traces["both"], traces["late"]) is (name != "slowmo")


def construction(rank: int, world_size: int) -> None:
    """The optimiser made before or after the method, and frozen parameters given to both or to neither."""
    for name in NAMES:
        late = net(rank)  # the first worker's weights become everybody's
        method = make_method(name, late, co2=CONFIG, lr=lambda: 0.3)[1]
        thawed = {"plain": train(build(name, net()), rank), "optimiser first": train(build(name, net(rank)), rank)}
        check(thawed | {"method first": train(Parts(late, sgd(late.parameters()), method), rank)})
        lean, both = net(frozen=True), net(frozen=True)
        traces = {"neither": train(build(name, lean, optimizer=sgd(lean[1:].parameters()), given=lean[1:]), rank)}
        check(traces | {"both": train(build(name, both), rank), "thawed": thawed["plain"]}, differ=("thawed",))
        assert torch.equal(everything(both[0]), everything(net()[0])), "the frozen layer has moved"


def tied_net(how: str) -> nn.Sequential:
    """A layer used twice, or two that share their parameters, or two that only start alike."""
    torch.manual_seed(0)
    first, last = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    if how == "tied":
        last.weight, last.bias = first.weight, first.bias
    return nn.Sequential(first, nn.Tanh(), {"twice": first, "tied": last, "alike": copy.deepcopy(first)}[how])


def tied_weights(rank: int, world_size: int) -> None:
    """A tied weight is one tensor, given once by parameters() or twice in a list: bit for bit as one layer's."""
    traces = {how: train(build("co2", tied_net(how)), rank)[:, :42] for how in ("twice", "tied", "alike")}
    model = tied_net("tied")
    method = CO2([*model[0].parameters(), *model[2].parameters()], CONFIG)
    check(traces | {"in a list": train(Parts(model, sgd(model.parameters()), method), rank)}, differ=("alike",))
    assert model[0].weight is model[2].weight


def compiled(rank: int, world_size: int) -> None:
    """Both backends run the operations that were traced, so bit for bit, whichever module CO2 was given."""
    traces = {"plain": train(build("co2", net()), rank)}
    for backend, original in (("eager", True), ("aot_eager", False)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model: Any = torch.compile(net(), backend=backend)
        traces[backend] = train(build("co2", model, given=model._orig_mod if original else model), rank)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "compiled nothing, or again at a boundary"
    check(traces)


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 108), nn.Unflatten(1, (3, 6, 6)), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh()
    return nn.Sequential(*layers, nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()


def strides(model: nn.Module) -> list[tuple[int, ...]]:
    return [p.stride() for p in model.parameters()]


def channels_last(rank: int, world_size: int) -> None:
    """Convolutions add in another order there. A model is converted before the method is made, or mid-round."""
    convert = partial(nn.Module.to, memory_format=torch.channels_last)
    contiguous, expected = strides(conv_net()), strides(convert(conv_net()))
    assert contiguous != expected

    def look(at: int, parts: Parts, step: int) -> None:
        if step == at:
            convert(parts.model)
        assert strides(parts.model) == (contiguous if step < at else expected), step

    for name in NAMES:
        traces = {"contiguous": train(build(name, conv_net()), rank)}
        traces["before"] = train(build(name, convert(conv_net())), rank, look=partial(look, -1))
        traces["mid-round"] = train(build(name, conv_net()), rank, look=partial(look, 4))
        check(traces, tolerance=1e-9)


TESTED = (evaluations, checkpoints, trainers, groups_and_schedules, construction, tied_weights, compiled, channels_last)


WHOLE = (trainers, groups_and_schedules, compiled, channels_last)


@pytest.mark.parametrize(
    "loops", [pytest.param(loops, marks=pytest.mark.slow if loops in WHOLE else ()) for loops in TESTED]
)
def test_trains_as_in_the_plain_loop(loops: Any):
    run_distributed(loops, 2)
