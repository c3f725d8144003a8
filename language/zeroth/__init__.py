"""DistZO2: zeroth-order training, whose workers exchange scalars. After the abstract and ZO2's released code."""

from .exchange import ZerothConfig
from .method import Zeroth
from .order import StepResult, ZerothOrder
from .replay import ScalarLog

__all__ = ["ScalarLog", "StepResult", "Zeroth", "ZerothConfig", "ZerothOrder"]
