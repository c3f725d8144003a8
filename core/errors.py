"""The errors that a user of this project meets."""


class UserError(ValueError):
    """A mistake in what the user asked for: one line that names the value and the remedy.

    The train scripts print it without a traceback and exit with status 2.
    """


class CollectiveError(RuntimeError):
    """A collective failed: names this rank, the round, and the ranks that did not answer."""


class DivergedError(RuntimeError):
    """Training cannot go on: what workers hold is not finite, or one is left out of the mean round after round."""
