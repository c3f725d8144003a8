"""A store on several machines, of which a minority may be lost: etcd, which is not part of this package.

torch's own EtcdStore uses a protocol that etcd has given up. This one uses the JSON gateway of etcd 3.4 and later.
"""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import UserError

PORT = 2379
GIVE_UP = 20.0  # seconds without any answer after which etcd counts as lost; an election takes about two
ANSWER_WITHIN = 3.0  # seconds until the next member is asked
LEASE = 3  # seconds that a leader may be silent


class NotLeading(Exception):
    """Another process leads, so a write of this one was refused."""


class EtcdStore(dist.Store):
    """The part of torch's Store that elastic runs and gloo use, over etcd.

    Keep a reference to it: c10d loses a Python store with its last Python reference.

    Args:
        url: etcd://HOST[:PORT],HOST[:PORT],.../RUN. Keys of different runs are apart.

    Attributes:
        hosts: The members; the first is asked first.
        guard: If set, a comparison of etcd's that must hold for every write. Otherwise NotLeading is raised.
    """

    def __init__(self, url: str):
        super().__init__()
        members, _, run = url.removeprefix("etcd://").partition("/")
        pairs = [member.partition(":") for member in members.split(",")]
        if not url.startswith("etcd://") or not run or not all(h and (p or "1").isdecimal() for h, _, p in pairs):
            raise UserError(f"--store {url}: give etcd://HOST,HOST,HOST/RUN, with a name of the run's own")
        self.url, self.hosts = url, [(host, int(port or PORT)) for host, _, port in pairs]
        self.guard: dict[str, str] | None = None
        self._prefix, self._timeout, self._lock = f"/co2/{run}/", timedelta(seconds=300), threading.Lock()
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, call: str, body: dict[str, Any], *, again: bool = True) -> dict[str, Any]:
        """Returns etcd's answer, from any member.

        Args:
            call: Name of the call, such as kv/put.
            body: Its arguments.
            again: Whether the call may be repeated if it is not known whether it was carried out.

        Raises:
            torch.distributed.DistNetworkError: If no member answers within GIVE_UP seconds.
        """
        until, why = time.monotonic() + GIVE_UP, ""
        with self._lock:
            while time.monotonic() < until:
                sent = False
                try:
                    if self._connection is None:
                        self._connection = http.client.HTTPConnection(*self.hosts[0], timeout=ANSWER_WITHIN)
                        self._connection.connect()
                    sent = True
                    self._connection.request("POST", f"/v3/{call}", json.dumps(body))
                    answer = self._connection.getresponse()
                    said = json.loads(answer.read())
                    if answer.status == 200:
                        return said
                    why = str(said.get("error", said))
                    again &= answer.status >= 500  # otherwise the call itself is wrong
                except (OSError, http.client.HTTPException, ValueError) as error:
                    why = f"{type(error).__name__}: {error}"
                self._connection = None
                if sent and not again:
                    break
                self.hosts.append(self.hosts.pop(0))
                time.sleep(0.1)
        raise dist.DistNetworkError(f"{self.url}: etcd does not answer ({why})")

    def key(self, name: str) -> str:
        return _encoded(self._prefix + name)

    def _commit(self, compare: list[dict[str, str]], *success: Any, failure: Any = None, again: bool = True) -> Any:
        """Carries out `success` if the comparisons and the guard hold, otherwise `failure`."""
        body = {"compare": compare + ([self.guard] if self.guard else []), "success": success}
        answer = self.ask("kv/txn", body | ({"failure": [failure]} if failure else {}), again=again)
        if self.guard and not answer.get("succeeded"):
            raise NotLeading
        return answer

    def _put(self, name: str, value: str | bytes, **more: str) -> dict[str, Any]:
        return {"requestPut": {"key": self.key(name), "value": _encoded(value), **more}}

    def _read(self, name: str) -> dict[str, str] | None:
        return (self.ask("kv/range", {"key": self.key(name)}).get("kvs") or [None])[0]

    # -- torch.distributed.Store ------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._commit([], self._put(key, value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        found = self._read(key)
        return _decoded(found) if found else self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        ranges = [{"requestRange": {"key": self.key(key), "countOnly": True}} for key in keys]
        found = self.ask("kv/txn", {"success": ranges})["responses"]
        return all(int(one["response_range"].get("count", 0)) for one in found)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        until, pause = time.monotonic() + (timeout or self._timeout).total_seconds(), 0.005
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"{', '.join(keys)}: not set in time")
            time.sleep(pause)
            pause = min(0.1, 1.5 * pause)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        missing = {"key": self.key(key), "target": "CREATE", "create_revision": "0"}
        equal = {"key": self.key(key), "target": "VALUE", "value": _encoded(expected)}
        fallback = {"requestRange": {"key": self.key(key)}}
        answer = self._commit([equal if expected else missing], self._put(key, desired), failure=fallback)
        if answer.get("succeeded"):
            return desired.encode() if isinstance(desired, str) else bytes(desired)
        found = answer["responses"][0]["response_range"].get("kvs")
        return _decoded(found[0]) if found else expected.encode() if isinstance(expected, str) else bytes(expected)

    def add(self, key: str, amount: int) -> int:
        while True:
            found = self._read(key) or {"mod_revision": "0"}
            total = str(int(_decoded(found) or b"0") + amount)
            unchanged = {"key": self.key(key), "target": "MOD", "mod_revision": found["mod_revision"]}
            if self._commit([unchanged], self._put(key, total), again=False).get("succeeded"):
                return int(total)

    def delete_key(self, key: str) -> bool:
        return int(self.ask("kv/deleterange", {"key": self.key(key)}).get("deleted", 0)) > 0

    def delete_below(self, start: str) -> None:
        """Deletes all keys that begin with `start`."""
        first = (self._prefix + start).encode()
        end = first[:-1] + bytes([first[-1] + 1])
        self.ask("kv/deleterange", {"key": _encoded(first), "range_end": _encoded(end)})

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout


class Election:
    """Lets one of several processes lead, the holder of a lease of etcd.

    It sets the store's guard, so that etcd refuses the writes of a leader that was stopped for longer than its lease.

    Args:
        store: A store of this process's own, for the leader's writes.
        name: This process's name.
        on_lead: Called when this process begins to lead.
    """

    def __init__(self, store: EtcdStore, name: str, on_lead: Any):
        self.store, self.name, self.on_lead = store, name, on_lead
        self._lease, self._next = "", 0.0

    def leads(self) -> bool:
        """Returns whether this process leads, after it has renewed its lease or tried to get one."""
        now = time.monotonic()
        if now < self._next:
            return bool(self._lease)
        self._next, store = now + LEASE / 6, self.store
        if self._lease:
            left = store.ask("lease/keepalive", {"ID": self._lease}).get("result", {}).get("TTL", 0)
            if int(left) > 0:
                return True
            self.lose()
        if store._read("leader"):
            return False
        lease = store.ask("lease/grant", {"TTL": str(LEASE)})["ID"]
        missing = {"key": store.key("leader"), "target": "CREATE", "create_revision": "0"}
        answer = store._commit([missing], store._put("leader", self.name, lease=lease))
        if answer.get("succeeded"):
            revision = answer["header"]["revision"]
            store.guard = missing | {"create_revision": revision}
            self._lease = lease
            self.on_lead()
        return bool(self._lease)

    def lose(self) -> None:
        """Stops leading."""
        self._lease, self.store.guard = "", None

    def resign(self) -> None:
        """Stops leading, and lets another process lead at once."""
        if self._lease:
            self.store.ask("lease/revoke", {"ID": self._lease})
        self.lose()


def _encoded(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else bytes(text)).decode()


def _decoded(found: dict[str, str]) -> bytes:
    return base64.b64decode(found.get("value", ""))
