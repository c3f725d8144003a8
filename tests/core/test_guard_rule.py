"""By what rule a worker is left out of the mean, and how an optimiser forgets what a bad step left in it."""

import pytest
import torch
from torch import nn

import core.co2
from core.errors import DivergedError
from core.flight import Flight
from core.robust.guard import BUFFER, LEFT_OUT_AGAIN, WARM_UP, Guard, forget
from core.rounds import Heard


def make_guard(workers: int = 1, factor: float | None = 10.0) -> tuple[Guard, core.co2.CO2]:
    """As one of so many workers, whose buffers are one number."""

    def flight(device: torch.device) -> Flight:
        alone = Flight(device)
        alone.world_size = alone.places = workers
        return alone

    guard = Guard(factor)
    params, buffers = [nn.Parameter(torch.zeros(2))], [torch.zeros(1)]
    return guard, core.co2.CO2(params, buffers=buffers, flight=flight, riders=[guard])


def sends(guard: Guard, bare: core.co2.CO2, size: float, *, buffer: float = 0.0, steps: int = 1) -> int:
    """The verdict on a difference of that norm."""
    (bucket,) = bare.buckets
    bucket.payload.fill_(size / 2**0.5)
    bucket.values.fill_(buffer)
    bare.scalars.set("weight", 1.0)
    bare.local_steps = steps
    guard.pack()
    assert bare.scalars["weight"].item() == (guard.verdict == 0)
    assert bare.scalars["left_out"].item() == guard.verdict
    assert not guard.is_left_out or not (bucket.payload.any() or bucket.values.any())
    assert guard.is_left_out or bucket.payload.all()
    return int(guard.verdict)


def verdicts(sizes: list[float], factor: float | None = 10.0) -> list[int]:
    of = make_guard(factor=factor)
    return [sends(*of, size) for size in sizes]


def hears(guard: Guard, codes: list[float], number: int) -> None:
    guard.hear({"left_out": codes}, Heard(number, len(codes), len(codes)))


USUAL = [1.0] * WARM_UP
NAN, INF = float("nan"), float("inf")


def test_what_counts_as_a_jump():
    assert verdicts([*USUAL, 9.0, 1.0]) == [0] * (WARM_UP + 2)
    assert verdicts([*USUAL, 11.0, 1.0]) == [0] * WARM_UP + [2, 0]
    assert verdicts([1.0, 1000.0, 1.0]) == [0, 0, 0], "nothing is usual yet"
    assert verdicts([*USUAL, 1e6], factor=None) == [0] * (WARM_UP + 1)


def test_a_level_that_lasts_is_a_jump_once_and_growth_without_end_is_one_for_ever():
    assert verdicts([*USUAL, 100.0, 90.0, 80.0, 2000.0]) == [0] * WARM_UP + [2, 0, 0, 2]
    assert verdicts([*USUAL, 1e2, 1e4, 1e6]) == [0] * WARM_UP + [2, 2, 2]


def test_what_is_not_finite_never_counts_and_is_not_remembered():
    assert verdicts([NAN, *USUAL, INF, -INF, 11.0, 1.0]) == [1, *[0] * WARM_UP, 1, 1, 2, 0]


def test_a_buffer_that_is_not_finite_counts_too():
    assert sends(*make_guard(), 1.0, buffer=NAN) == BUFFER


def test_the_number_of_local_steps_is_allowed_for():
    """48 times the steps lead at most 48 times as far: no jump; with as many steps it is one."""
    of = make_guard()
    assert not any(sends(*of, 1.0, steps=4) for _ in range(WARM_UP))
    assert sends(*of, 48.0, steps=192) == 0
    assert sends(*of, 48.0, steps=4) == 2


def test_the_bad_one_is_named_and_after_some_rounds_it_ends_the_run():
    guard, _ = make_guard(3)
    for number in range(LEFT_OUT_AGAIN):
        with pytest.warns(UserWarning, match=f"^rank 1 is left out of the mean of round {number}: .*not finite"):
            hears(guard, [0.0, 1.0, 0.0], number)
    with pytest.raises(DivergedError, match=f"^rank 1 .*as in the {LEFT_OUT_AGAIN} rounds before; lower") as caught:
        hears(guard, [0.0, 1.0, 0.0], 9)
    assert "\n" not in str(caught.value)


def test_rounds_in_a_row_alone_count():
    guard, _ = make_guard(2)
    with pytest.warns(UserWarning):
        for number in range(20):
            hears(guard, [2.0 * (number % 2), 0.0], number)
    hears(guard, [0.0, 0.0], 20)


def test_when_nobody_is_finite_nothing_goes_on():
    guard, _ = make_guard(2)
    with pytest.raises(DivergedError, match="every worker"):
        hears(guard, [1.0, 1.0], 3)
    with pytest.warns(UserWarning):
        hears(guard, [2.0, 2.0], 3)  # all have jumped, as where a learning rate starts anew


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_an_optimiser_that_forgets_begins_anew(name: str):
    options = {"momentum": 0.9} if name == "SGD" else {}
    p, q = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    spoilt, fresh = (getattr(torch.optim, name)([x], lr=0.1, **options) for x in (p, q))
    for bad in (1.0, NAN):
        p.grad = torch.full((2,), bad)
        spoilt.step()
    with torch.no_grad():
        p.copy_(q)
    for left_out in (False, True):
        forget(spoilt)(torch.tensor(left_out))
    for x, optimizer in ((p, spoilt), (q, fresh)):
        x.grad = torch.tensor([0.5, 3.0])
        optimizer.step()
    assert torch.equal(p, q)


def test_what_an_optimiser_has_gathered_is_wiped_at_once(monkeypatch: pytest.MonkeyPatch):
    """On a GPU that is one kernel at every boundary, however many parameters there are."""
    params = [nn.Parameter(torch.ones(n)) for n in (2, 3, 4)]
    adam, plain = torch.optim.Adam(params, lr=0.1), torch.optim.SGD(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    adam.step()
    plain.step()
    calls: list[int] = []
    monkeypatch.setattr("core.robust.guard.wipe", lambda flats, where: calls.append(len(flats)))
    forget(adam)(torch.tensor(True))
    assert calls == [3 * len(adam.state)], "two moments and a count of steps of each"
    monkeypatch.undo()
    forget(plain)(torch.tensor(True))  # has gathered nothing
