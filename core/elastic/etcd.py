"""A store on several machines, of which a minority may be lost: etcd 3.4 or later, which is not part of this package.

torch's own EtcdStore uses a protocol that etcd has given up. This one uses etcd's JSON gateway.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ..errors import UserError

PORT = 2379
GIVE_UP = 20.0  # seconds without any answer after which etcd counts as lost; an election takes about two
ANSWER_WITHIN = 3.0  # seconds until the next member is asked
LEASE = 3  # seconds that a leader may be silent


class NotLeading(Exception):
    """Another process leads, so a write of this one was refused."""


class EtcdStore(Store):
    """The part of torch's Store that elastic runs and gloo use. Keep a reference: c10d does not keep a Python store.

    Args:
        url: etcd://HOST[:PORT],HOST[:PORT],.../RUN. Each run has its own keys.
        first: Number of the member that is asked first, modulo how many there are.

    Attributes:
        hosts: The members, in the order in which they are asked.
        guard: If set, a comparison that must hold for every write. Otherwise the write raises NotLeading.
    """

    def __init__(self, url: str, first: int = 0):
        super().__init__()
        members, _, run = url.removeprefix("etcd://").partition("/")
        pairs = [member.partition(":") for member in members.split(",")]
        known = all(h and re.fullmatch("[0-9]{0,5}", p) and int(p or PORT) < 1 << 16 for h, _, p in pairs)
        if not url.startswith("etcd://") or not run or not known:
            raise UserError(f"--store {url}: give etcd://HOST,HOST,HOST/RUN, with a name of the run's own")
        hosts = deque((host, int(port or PORT)) for host, _, port in pairs)
        hosts.rotate(-first)
        self.url, self.hosts = url, hosts
        self.guard: dict[str, str] | None = None
        self._prefix, self._lock = f"/co2/{run}/", threading.Lock()
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, call: str, body: dict[str, Any], *, again: bool = True) -> dict[str, Any]:
        """Returns a member's answer. DistNetworkError if none answers within GIVE_UP seconds.

        Without `again`, a call that may have been carried out is not repeated.
        """
        until, why, sent = time.monotonic() + GIVE_UP, "", False
        with self._lock:
            while time.monotonic() < until and (again or not sent):
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
                    why = str(said)
                    again &= answer.status >= 500  # otherwise the call itself is wrong
                except (OSError, http.client.HTTPException, ValueError) as error:
                    why = f"{type(error).__name__}: {error}"
                self._connection = None
                self.hosts.rotate(-1)
                time.sleep(0.1)
        raise dist.DistNetworkError(f"{self.url}: etcd does not answer ({why})")

    def commit(self, compare: list[Any], name: str, value: str | bytes, again: bool = True, **more: str) -> Any:
        """Sets a value if the comparisons and the guard hold, otherwise reads it. Returns etcd's answer."""
        put = {"requestPut": {"key": self.key(name), "value": _encoded(value), **more}}
        body = {"compare": compare + ([self.guard] if self.guard else []), "success": [put]}
        body["failure"] = [{"requestRange": {"key": self.key(name)}}]
        answer = self.ask("kv/txn", body, again=again)
        if self.guard and not answer.get("succeeded"):
            raise NotLeading
        return answer

    def key(self, name: str) -> str:
        return _encoded(self._prefix + name)

    def read(self, name: str) -> dict[str, str]:
        """Returns etcd's record of a key, or an empty one."""
        return (self.ask("kv/range", {"key": self.key(name)}).get("kvs") or [{}])[0]

    # -- torch.distributed.Store ------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self.commit([], key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return _decoded(self.read(key))

    def check(self, keys: Sequence[str]) -> bool:
        ranges = [{"requestRange": {"key": self.key(key), "countOnly": True}} for key in keys]
        found = self.ask("kv/txn", {"success": ranges})["responses"]
        return all(int(one["response_range"].get("count", 0)) for one in found)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        within: timedelta = timeout or self.timeout  # pyright: ignore[reportAttributeAccessIssue]
        until, pause = time.monotonic() + within.total_seconds(), 0.005
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"{', '.join(keys)}: not set in time")
            time.sleep(pause)
            pause = min(0.1, 1.5 * pause)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        equal = {"key": self.key(key), "target": "VALUE", "value": _encoded(expected_value)}
        answer = self.commit([equal if expected_value else self.missing(key)], key, desired_value)
        if answer.get("succeeded"):
            return base64.b64decode(_encoded(desired_value))
        found = answer["responses"][0]["response_range"].get("kvs")
        return _decoded(found[0]) if found else base64.b64decode(_encoded(expected_value))

    def add(self, key: str, value: int) -> int:
        while True:
            found = self.read(key)
            total = str(int(_decoded(found) or b"0") + value)
            same = {"key": self.key(key), "target": "MOD", "mod_revision": found.get("mod_revision", "0")}
            if self.commit([same], key, total, again=False).get("succeeded"):
                return int(total)

    def missing(self, name: str) -> dict[str, str]:
        return {"key": self.key(name), "target": "CREATE", "create_revision": "0"}

    def delete_below(self, start: str) -> None:
        """Deletes all keys that begin with `start`, which ends with a slash."""
        end = self.key(start[:-1] + "0")  # follows the slash
        self.ask("kv/deleterange", {"key": self.key(start), "range_end": end})


class Election:
    """Lets one of several processes lead, the holder of a lease of etcd. Its store then refuses writes after the lease.

    Args:
        store: A store for the leader's writes only.
        name: This process's name.
        on_lead: Called when this process begins to lead.
    """

    def __init__(self, store: EtcdStore, name: str, on_lead: Callable[[], None]):
        self.store, self.name, self.on_lead = store, name, on_lead
        self._lease, self._next = "", 0.0

    def leads(self) -> bool:
        """Returns whether this process leads, after it has renewed its lease or tried to get one."""
        now, store = time.monotonic(), self.store
        if now < self._next:
            return bool(self._lease)
        self._next = now + LEASE / 6
        if self._lease:
            if int(store.ask("lease/keepalive", {"ID": self._lease}).get("result", {}).get("TTL", 0)) > 0:
                return True
            self.lose()
        if store.read("leader"):
            return False
        lease = store.ask("lease/grant", {"TTL": str(LEASE)})["ID"]
        answer = store.commit([store.missing("leader")], "leader", self.name, lease=lease)
        if answer.get("succeeded"):
            store.guard = store.missing("leader") | {"create_revision": answer["header"]["revision"]}
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
