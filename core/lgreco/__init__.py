"""L-GreCo: each layer its own compression, chosen anew while training. After the abstract and the released code.

choices, curves and decide say what is chosen, by which errors, and when; layout, senders and reducer send it.
"""

from .decide import Allocation
from .reducer import LGreco

__all__ = ["Allocation", "LGreco"]
