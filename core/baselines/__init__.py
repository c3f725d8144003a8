"""The methods that CO2 is compared with, and the table of all methods."""

from .local import DiLoCo, DiLoCoConfig, LocalSGD, OverlapLocalConfig, OverlapLocalSGD, SlowMo, SlowMoConfig

__all__ = ["DiLoCo", "DiLoCoConfig", "LocalSGD", "OverlapLocalConfig", "OverlapLocalSGD", "SlowMo", "SlowMoConfig"]
