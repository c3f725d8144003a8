"""L-GreCo: each layer its own compression, chosen anew while training. After the abstract and the released code.

config, choices, curves, decide and clock are what is chosen, by which errors, and when; layout, senders and reducer
send it.
"""

from .decide import Allocation, Decider
from .reducer import LGreco

__all__ = ["Allocation", "Decider", "LGreco"]
