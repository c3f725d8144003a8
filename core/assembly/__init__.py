"""The rooms put together: CO2 with all that runs on real clusters need, and what the other methods take of it."""

from . import kernels as kernels
from .co2 import CO2 as CO2
from .co2 import ShardedCO2 as ShardedCO2
from .config import CO2Config as CO2Config
from .config import of_kind as of_kind
from .elastic import elastic_co2 as elastic_co2
from .plugged import Options as Options
from .plugged import plugs as plugs
from .plugged import plugs_of_other as plugs_of_other
from .plugged import tuned_for as tuned_for
from .wire import LGrecoConfig as LGrecoConfig
from .wire import WireConfig as WireConfig
