"""CO2 (arXiv 2401.16265): data-parallel training whose communication hides behind computation.

`__all__` has the public names. docs/ shows an example of each.
"""

from . import guards  # noqa: F401 - registers what every method is made with
from .baselines.table import make_method
from .checkpoint.runs import load, save
from .co2 import CO2
from .compression.lgreco.choices import LGrecoConfig
from .config import CO2Config, CompressionConfig
from .errors import CollectiveError, DivergedError, UserError
from .guards.arguments import checked
from .nodes import node_mesh
from .stats import RoundStats

checked(CO2Config, "recommended")
checked(CO2)
checked(CompressionConfig)
checked(LGrecoConfig)

__all__ = [
    "CO2",
    "CO2Config",
    "CollectiveError",
    "CompressionConfig",
    "DivergedError",
    "LGrecoConfig",
    "RoundStats",
    "UserError",
    "load",
    "make_method",
    "node_mesh",
    "save",
]
__version__ = "0.1.0"
