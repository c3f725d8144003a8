"""CO2 whose workers come and go."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from ..adaptive.config import Schedule, settings_of
from ..adaptive.merging import OnArrival
from ..checkpoints.saved import Saved
from ..elastic.flight import ElasticFlight
from ..elastic.joining import Joining, check_elastic
from ..elastic.members import Members
from ..rounds import Rider
from ..testing.link import Link, SlowFlight
from .co2 import Options, plugs
from .config import CO2Config, WireConfig, named_rule


class SlowElasticFlight(SlowFlight, ElasticFlight):
    """ElasticFlight over an emulated link."""


class ElasticCO2(Saved, OnArrival):
    """What elastic_co2 makes: it reads the settings of all riders."""

    reads = CO2Config


def elastic_co2(
    params: Iterable[Tensor],
    config: CO2Config | None = None,
    *,
    members: Members,
    buffers: Iterable[Tensor] = (),
    timeout: float = 600.0,
    link: Link | None = None,
    schedule: Schedule | None = None,
    riders: Sequence[Rider] = (),
) -> tuple[OnArrival, Joining]:
    """CO2 whose workers come and go (core/elastic/joining.py), and the rider that lets them in.

    The arguments: see CO2. tau auto and narrow wires are refused; wire auto stands for float32. It
    takes a copy of the parameters more. members: see Members. Make it on every worker before any process group exists,
    then call the rider's `join` on all.
    """
    given = named_rule(config)
    check_elastic(given)
    c = replace(given, wire=WireConfig())
    settings = settings_of(c, schedule)
    options = Options(buffers=buffers, timeout=timeout, riders=riders)
    carrier = functools.partial(SlowElasticFlight, link=link) if link else ElasticFlight
    flight = functools.partial(carrier, members=members)
    plugged = plugs(c, lambda number: settings(number).tau, options, times=False, flight=flight)
    joining = Joining(members, at_once=c.delay == 0)
    plugged["riders"].insert(0, joining)
    return ElasticCO2(params, settings, **plugged), joining
