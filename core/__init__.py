"""CO2 (arXiv 2401.16265): data-parallel training whose communication hides behind computation."""

from .baselines.local import DiLoCo as DiLoCo
from .baselines.local import DiLoCoConfig as DiLoCoConfig
from .baselines.local import LocalSGD as LocalSGD
from .baselines.local import OverlapLocalConfig as OverlapLocalConfig
from .baselines.local import OverlapLocalSGD as OverlapLocalSGD
from .baselines.local import SlowMo as SlowMo
from .baselines.local import SlowMoConfig as SlowMoConfig
from .baselines.table import make_method as make_method
from .checkpoint.runs import load as load
from .checkpoint.runs import save as save
from .co2 import CO2 as CO2
from .compression.lgreco.choices import LGrecoConfig as LGrecoConfig
from .config import CO2Config as CO2Config
from .config import CompressionConfig as CompressionConfig
from .errors import CollectiveError as CollectiveError
from .errors import DivergedError as DivergedError
from .errors import UserError as UserError
from .nodes import node_mesh as node_mesh
from .stats import RoundStats as RoundStats

__version__ = "0.1.0"
