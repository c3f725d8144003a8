"""DistZO2: zeroth-order training, whose workers exchange scalars. After the abstract and ZO2's released code."""

from .method import Zeroth
from .order import ScalarLog, StepResult, ZerothConfig, ZerothOrder

__all__ = ["ScalarLog", "StepResult", "Zeroth", "ZerothConfig", "ZerothOrder"]
