"""The rooms put together: CO2 with all that runs on real clusters need, and what the other methods take of it."""

from .co2 import CO2 as CO2
from .co2 import Options as Options
from .co2 import plugs as plugs
from .co2 import plugs_of_other as plugs_of_other
from .co2 import tuned_for as tuned_for
from .config import CO2Config as CO2Config
from .config import LGrecoConfig as LGrecoConfig
from .config import WireConfig as WireConfig
from .config import named_rule as named_rule
from .config import of_kind as of_kind
