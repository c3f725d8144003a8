"""CO2 (arXiv 2401.16265): data-parallel training whose communication hides behind computation."""

from .checkpoint import load as load
from .checkpoint import save as save
from .co2 import CO2 as CO2
from .compression.lgreco import LGrecoConfig as LGrecoConfig
from .config import CO2Config as CO2Config
from .config import CompressionConfig as CompressionConfig
from .errors import CollectiveError as CollectiveError
from .errors import DivergedError as DivergedError
from .errors import UserError as UserError
from .methods import DiLoCo as DiLoCo
from .methods import DiLoCoConfig as DiLoCoConfig
from .methods import LocalSGD as LocalSGD
from .methods import OverlapLocalConfig as OverlapLocalConfig
from .methods import OverlapLocalSGD as OverlapLocalSGD
from .methods import SlowMo as SlowMo
from .methods import SlowMoConfig as SlowMoConfig
from .methods import make_method as make_method
from .placement import node_mesh as node_mesh
from .stats import RoundStats as RoundStats

__version__ = "0.1.0"
