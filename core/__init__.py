"""CO2 (arXiv 2401.16265): data-parallel training whose communication hides behind computation."""

from .errors import CollectiveError, DivergedError, UserError
from .methods import (
    CO2,
    AutoConfig,
    CO2Config,
    DelayedCO2,
    DelayedConfig,
    LGrecoConfig,
    LocalSGD,
    OverlapLocalConfig,
    OverlapLocalSGD,
    ShardedCO2,
    SlowMo,
    SlowMoConfig,
    WireConfig,
    load,
    make_method,
    save,
)
from .sharded.mesh import node_mesh
from .stats import RoundStats
from .zeroth import ScalarLog, ZerothConfig, ZerothOrder

__version__ = "0.1.0"

__all__ = [
    "AutoConfig",
    "CO2",
    "CO2Config",
    "CollectiveError",
    "DelayedCO2",
    "DelayedConfig",
    "DivergedError",
    "LGrecoConfig",
    "LocalSGD",
    "OverlapLocalConfig",
    "OverlapLocalSGD",
    "RoundStats",
    "ScalarLog",
    "ShardedCO2",
    "SlowMo",
    "SlowMoConfig",
    "UserError",
    "WireConfig",
    "ZerothConfig",
    "ZerothOrder",
    "load",
    "make_method",
    "node_mesh",
    "save",
]
