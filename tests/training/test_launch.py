"""The launcher of elastic runs: where its store listens, and who it lists."""

import errno
import json
import socket
from typing import Any

import pytest
import torch.distributed as dist

from core import UserError
from tests.ports import listening_at
from training import launch
from training.launch import Agent, Coordinator

# -- the launcher's store -----------------------------------------------------------------------------------


def nobody(environment: dict[str, str]) -> Any:
    raise AssertionError("no worker is started")


def test_where_the_launchers_store_listens(monkeypatch: pytest.MonkeyPatch):
    """At its address; everywhere where other nodes take its name for loopback, or it is no address of this machine."""
    assert listening_at(Agent(nobody, 1)._served.port) == {"127.0.0.1"}
    assert listening_at(Agent(nobody, 1, nodes=2, host="127.0.1.1")._served.port) & {"::", "0.0.0.0"}
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="a free --master-port"):
        Agent(nobody, 1, port=taken.getsockname()[1])

    def refuse(*_: Any) -> Any:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(launch.socket, "create_server", refuse)
    assert listening_at(Agent(nobody, 1)._served.port) & {"::", "0.0.0.0"}


# -- the coordinator ------------------------------------------------------------------------------------------


class Table:
    """A coordinator over a store of this process, and what workers would write there."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.coordinator, self.beat = Coordinator(self.store, 1), 0
        self.store.set("patience", "1000")

    def look(self, alive: list[str], **keys: str) -> tuple[int, list[str]]:
        """keys: 'came_1_0.0'="failed" is the key came/1/0.0."""
        self.beat += 1
        self.store.set("node/0", json.dumps({"beat": self.beat, "alive": alive}))
        for key, value in keys.items():
            self.store.set(key.replace("_", "/"), value)
        self.coordinator.look()
        return self.coordinator.generation, self.coordinator.members

    def listed(self, number: int) -> dict[str, Any]:
        return json.loads(self.store.get(f"generation/{number}"))


def test_who_belongs_to_a_generation():
    table, three = Table(), ["1.0", "0.0", "10.0"]
    ready = {f"ready_{name}": "" for name in three}
    assert table.look(three, **dict(list(ready.items())[:2])) == (0, [])  # all that were started are waited for
    assert table.look(three, **ready) == (1, ["0.0", "1.0", "10.0"]) and not table.store.check(["broken/1"])
    table.look(["0.0", "10.0", "1.1"], **{"ready_1.1": ""})  # 1.0 has died, and was started again
    assert table.store.check(["broken/1"]) and table.store.check(["waiting/1"])
    alive = ["0.0", "10.0", "1.1"]
    assert table.look(alive, **{"came_1_0.0": "failed"})[0] == 1
    assert table.look(alive, **{"came_1_10.0": "failed"}) == (2, ["0.0", "10.0"])  # nobody joins in a failure
    assert not table.listed(2)["planned"]
    table.look(alive, **{"came_2_0.0": "planned"})
    assert table.look(alive, **{"came_2_10.0": "planned"}) == (3, ["0.0", "10.0", "1.1"])
    assert table.listed(3)["planned"]
    # a newcomer whose fetch has failed waits for the next time
    table.look(alive, **{"came_3_1.1": "empty", "ready_1.1": ""})
    assert table.look(alive, **{"came_3_0.0": "failed", "came_3_10.0": "failed"}) == (4, ["0.0", "10.0"])
    assert table.look(["1.1"]) == (5, ["1.1"])  # all that had state are lost: it founds anew


def test_a_silent_worker_is_left_out_after_the_patience():
    table = Table()
    table.store.set("patience", "0")
    table.look(["0.0", "1.0"], **{"ready_0.0": "", "ready_1.0": ""})
    table.look(["0.0", "1.0"], **{"came_1_1.0": "failed"})
    assert table.look(["0.0", "1.0"]) == (2, ["1.0"])
