"""Zeroth-order training whose workers exchange scalars, after DistZO2's abstract and ZO2's released code."""

from .method import of_run  # registers method zo
from .order import ScalarLog, ZerothConfig, ZerothOrder

__all__ = ["ScalarLog", "ZerothConfig", "ZerothOrder", "of_run"]
