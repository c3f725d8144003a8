"""The rooms put together: CO2 with all that runs on real clusters need, and what the other methods take of it."""

from . import kernels as kernels
from .co2 import CO2, ShardedCO2
from .config import CO2Config, checked
from .elastic import elastic_co2
from .plugged import Options, plugs, plugs_of_other, tuned_for
from .wire import LGrecoConfig, WireConfig

__all__ = [
    "CO2",
    "CO2Config",
    "LGrecoConfig",
    "Options",
    "ShardedCO2",
    "WireConfig",
    "checked",
    "elastic_co2",
    "plugs",
    "plugs_of_other",
    "tuned_for",
]
