"""Strangers on the network: what they write to the store, and what they do to the sockets."""

import contextlib
import socket
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from core import UserError
from core.elastic.sealed import SealedStore
from core.groups import of_all
from core.guards.failure import Peers
from tests.on_ranks import on_ranks


def test_what_a_stranger_writes_is_not_set():
    plain = dist.HashStore()
    ours, theirs = SealedStore(plain, "secret"), SealedStore(plain, "another")
    plain.set("broken/1", "x")
    theirs.set("generation/2", '{"names": []}')
    assert not ours.has("broken/1") and not ours.has("generation/2")
    with pytest.raises(UserError, match="the store's generation/2 was written with another CO2_SECRET"):
        ours.get("generation/2")
    ours.set("a", "1")
    plain.set("b", plain.get("a"))  # a value that was ours under another key
    assert ours.has("a") and ours.get("a") == b"1" and not ours.has("b")
    assert ours.compare_set("c", "", "x") == b"x" == ours.compare_set("c", "", "y")
    assert ours.compare_set("c", "x", "z") == b"z" == ours.get("c")


def test_strangers_that_drip_bytes_make_no_worker_silent():
    here: Any = Peers()
    address = (here.address.host, here.address.port)
    strangers = [socket.create_connection(address, 5.0) for _ in range(8)]
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.2):
            for stranger in strangers:
                try:
                    stranger.sendall(b"\xff")
                except OSError:
                    return

    threading.Thread(target=drip, daemon=True).start()
    here.known = {1: here.address}
    began = time.monotonic()
    assert here.ask([1], "7") == {1: "running"} and time.monotonic() - began < 1.5
    ended.set()
    with contextlib.suppress(ConnectionResetError):  # each is dropped in time
        assert [stranger.recv(1) for stranger in strangers] == [b""] * 8


@on_ranks(2)
def test_objects_travel_as_json(rank: int):
    assert of_all({"rank": rank, "at": (1, 2.5, None, True)}) == [
        {"rank": r, "at": [1, 2.5, None, True]} for r in range(2)
    ]
    assert of_all("ü" * rank) == ["", "ü"]
    with pytest.raises(TypeError):
        of_all(object())
