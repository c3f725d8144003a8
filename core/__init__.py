"""CO2 (arXiv 2401.16265): data-parallel training whose communication hides behind computation."""

from .errors import CollectiveError as CollectiveError
from .errors import DivergedError as DivergedError
from .errors import UserError as UserError
from .methods import CO2 as CO2
from .methods import CO2Config as CO2Config
from .methods import DelayedCO2 as DelayedCO2
from .methods import DelayedConfig as DelayedConfig
from .methods import LGrecoConfig as LGrecoConfig
from .methods import LocalSGD as LocalSGD
from .methods import OverlapLocalConfig as OverlapLocalConfig
from .methods import OverlapLocalSGD as OverlapLocalSGD
from .methods import ShardedCO2 as ShardedCO2
from .methods import SlowMo as SlowMo
from .methods import SlowMoConfig as SlowMoConfig
from .methods import WireConfig as WireConfig
from .methods import load as load
from .methods import make_method as make_method
from .methods import save as save
from .sharded.mesh import node_mesh as node_mesh
from .stats import RoundStats as RoundStats

__version__ = "0.1.0"
