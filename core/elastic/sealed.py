"""A store whose values only this run's processes can write."""

from __future__ import annotations

import contextlib
import hmac
import json
from collections.abc import Callable
from typing import Any

from ..errors import CollectiveError, UserError

SECRET = "CO2_SECRET"  # environment variable; the launcher of a single node makes one
DIGEST = 64  # characters


class SealedStore:
    """Puts a keyed digest (HMAC-SHA256) in front of every value. A value without it does not count as set.

    All calls raise CollectiveError if the store does not answer.

    Args:
        store: The store, which any machine that reaches it may write to.
        secret: The run's secret. If it is empty, any machine can compute the digests.

    Attributes:
        plain: The store itself, for torch's process groups.
    """

    def __init__(self, store: Any, secret: str):
        self.plain, self._secret = store, secret.encode()

    def proof(self, text: str) -> bytes:
        """Returns a digest of the text that only this run's processes can compute."""
        return hmac.new(self._secret, text.encode(), "sha256").hexdigest().encode()

    def set(self, key: str, value: str) -> None:
        self._ask(self.plain.set, key, self._seal(key, value))

    def get(self, key: str) -> bytes:
        """Returns the value, or waits for it. Raises UserError if another secret has written it."""
        return self._open(key, self._ask(self.plain.get, key))

    def read(self, key: str, default: Any) -> Any:
        """Returns the JSON value, or `default` if the key is not set."""
        return json.loads(self.get(key)) if self.has(key) else default

    def has(self, *keys: str) -> bool:
        """Returns whether all keys are set."""
        with contextlib.suppress(UserError):
            return self._ask(self.plain.check, [*keys]) and all(self.get(key) is not None for key in keys)
        return False

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets the value if it is still `expected`; "" means none. Returns the value then, as `get` does."""
        before = self._seal(key, expected) if expected else ""
        return self._open(key, self._ask(self.plain.compare_set, key, before, self._seal(key, desired)))

    def _ask(self, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except RuntimeError as error:
            remedy = "start again with --resume, or use --store etcd://... (docs/clusters.md)"
            raise CollectiveError(f"the run's store is gone, so its machine or launcher has ended: {remedy}") from error

    def _seal(self, key: str, value: str) -> str:
        return self.proof(f"{key}\n{value}").decode() + value

    def _open(self, key: str, sealed: bytes) -> bytes:
        value = sealed[DIGEST:]
        if not hmac.compare_digest(sealed[:DIGEST], self.proof(f"{key}\n{value.decode(errors='replace')}")):
            raise UserError(f"the store's {key} was written with another {SECRET}: set the same one on all nodes")
        return value
