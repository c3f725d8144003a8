"""Looks at every operation of torch, to tell what a GPU or its host would do."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Calls see(func, args, kwargs, made) for each operation inside; seen: what that returned, but for None."""

    def __init__(self, see: Callable[..., Any]):
        super().__init__()
        self._see, self.seen = see, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        found = self._see(func, args, kwargs or {}, made)
        self.seen += [] if found is None else [found]
        return made
