"""The emulated cluster's command line, what it refuses, and how its switch reads a frame."""

import os

import pytest

from bench.cluster import __main__ as launch
from bench.cluster import nodes, require_namespaces
from bench.cluster.beside import VNET_HEADER, targets
from core.errors import UserError


def test_rates_and_delays():
    rates = {"200mbit": 200.0, "1gbit": 1000.0, "2.5gbit": 2500.0, "500kbit": 0.5, ".5mbit": 0.5}
    for text, mbit in rates.items():
        assert launch.Launch(rate=text).rate_mbit == pytest.approx(mbit)
    for text, ms in {"5ms": 5.0, "0.5s": 500.0, "500us": 0.5, "0ms": 0.0}.items():
        assert launch.Launch(rate="1mbit", delay=text).delay_ms == pytest.approx(ms)


def test_missing_iproute2_and_a_kernel_that_refuses_are_named(monkeypatch, tmp_path):
    commands = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nodes, "SBIN", str(tmp_path))
    with pytest.raises(UserError, match="install iproute2, or throttle the link"):
        require_namespaces()
    for name in ("ip", "tc", "unshare"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{name}: not on this machine' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{commands}")
    with pytest.raises(UserError, match="unshare: not on this machine.*--throttle of a benchmark"):
        require_namespaces()


def test_the_switch_reads_the_destination():
    def leaves_by(address: bytes) -> list[int]:
        return list(targets(bytes(VNET_HEADER) + address + bytes(60), source=1, count=4))

    assert leaves_by(b"\x02\0\0\0\0\x03") == [2]
    assert leaves_by(b"\xff" * 6) == [0, 2, 3]  # a broadcast
    assert leaves_by(b"\x02\0\0\0\0\x09") == leaves_by(b"\x06\0\0\0\0\x01") == []
    second = bytes(VNET_HEADER) + b"\x02\0\0\0\1\x03" + bytes(60)  # of another network
    assert list(targets(second, source=5, count=4)) == [6] and not targets(second, source=1, count=4)
    assert list(targets(bytes(VNET_HEADER) + b"\xff" * 6, source=5, count=4)) == [4, 6, 7]
