"""CO2 (arXiv 2401.16265): data-parallel training whose communication hides behind computation."""

from core.baselines import LocalSGD, OverlapLocalSGD, SlowMo, make_method
from core.co2 import CO2, CO2Config
from core.errors import CollectiveError, UserError
from core.overlap import RoundStats

__version__ = "0.1.0"

__all__ = [
    "CO2",
    "CO2Config",
    "CollectiveError",
    "LocalSGD",
    "OverlapLocalSGD",
    "RoundStats",
    "SlowMo",
    "UserError",
    "make_method",
]
