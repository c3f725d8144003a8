"""DistZO2: zeroth-order fine-tuning, whose workers exchange scalars. After the abstract and ZO2's released code."""

from .config import ZerothConfig
from .order import StepResult, ZerothOrder
from .replay import ScalarLog

__all__ = ["ScalarLog", "StepResult", "ZerothConfig", "ZerothOrder"]
