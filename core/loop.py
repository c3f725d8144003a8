"""What a training loop, or another framework's callbacks, ask of a method besides `step`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self


class Loop:
    """As a context manager a method ends with its block, every worker's alike:

        with CO2(model.parameters(), CO2Config(tau=48), buffers=model.buffers()) as co2:
            for batch in loader:
                ...
                co2.step()

    calls finish() and close(). After an exception it calls leave() instead, and waits for nobody.

    What is said here holds where each step ends a round with equal parameters, as in DDP; Rounds says it for others.
    """

    @property
    def at_boundary(self) -> bool:
        """Whether a round has just closed on this worker (or none has begun), and all workers are at that boundary: the
        same on all after the same calls of step(). There they may evaluate, save and stop together."""
        return True

    def settle(self) -> bool:
        """At a boundary, for an evaluation or a checkpoint: waits for what was sent, where workers differ until it has
        come. Every worker must call it. True where all workers hold the same model now, False where each holds its own,
        whose loss is the greater: in mid-round, or while `at_boundary` is False. No reduction is launched for it, so
        that buffers, such as BatchNorm's statistics, are each worker's own until the first mean has landed: where it is
        merged at the next boundary, not yet at the first."""
        return True

    @contextlib.contextmanager
    def shared_model(self) -> Iterator[bool]:
        """As `settle`, for the block: a method that cannot go on from the common model lends it to the block alone."""
        yield self.settle()

    def finish(self) -> Any:
        """Ends what is under way, with equal parameters on all workers; every worker must call it."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the process group. Only after finish()."""
        raise NotImplementedError

    def leave(self) -> None:
        """After an exception, in place of finish() and close(): waits for nobody. Here the process's end is noticed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            return self.leave()
        self.finish()
        self.close()
