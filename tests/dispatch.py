"""Looks at every operation of torch, to tell what a GPU or its host would do, and which bytes are alive."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


class Live(Operations):
    """Counts the bytes of all storages that operators make, as long as they live; `held` were there before."""

    def __init__(self, held: list[Tensor]):
        super().__init__(self._count)
        self.now = self.peak = 0
        self._known = {t.untyped_storage()._cdata for t in held}

    def _count(self, _func: Any, _args: Any, _kwargs: Any, made: Any) -> None:
        for t in tree_leaves(made):
            if isinstance(t, Tensor) and (storage := t.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
