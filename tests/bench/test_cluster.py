"""The emulated cluster's command line, what it refuses, and how its switch reads a frame."""

import os
import sys
from pathlib import Path

import pytest

from bench.cluster import __main__ as launch
from bench.cluster import nodes, require_namespaces
from bench.cluster.beside import VNET_HEADER, targets
from core.errors import UserError
from tests.scripts import Mistakes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "text, mbit", [("200mbit", 200.0), ("1gbit", 1000.0), ("2.5gbit", 2500.0), ("500kbit", 0.5), (".5mbit", 0.5)]
)
def test_rates(text, mbit):
    assert launch.Launch(rate=text).rate_mbit == pytest.approx(mbit)


@pytest.mark.parametrize("text, ms", [("5ms", 5.0), ("0.5s", 500.0), ("500us", 0.5), ("0ms", 0.0)])
def test_delays(text, ms):
    assert launch.Launch(rate="1mbit", delay=text).delay_ms == pytest.approx(ms)


@pytest.mark.parametrize(
    "options, says",
    [
        ("--rate 200 -- x", "rate='200': give a number and one of kbit, mbit, gbit"),
        ("--rate 200MB -- x", "rate='200MB'"),
        ("--rate -1mbit -- x", "rate='-1mbit'"),
        ("--rate 0mbit -- x", "more than 0"),
        ("--rate 1mbit --delay 5 -- x", "delay='5': give a number and one of us, ms, s"),
        ("--rate 1mbit --nodes 0 -- x", "nodes=0"),
        ("--rate 1mbit --ranks-per-node 0 -- x", "ranks_per_node=0"),
        ("--rate 1mbit --nodes 1 --verify -- x", "2 or more"),
        ("--rate 1mbit --throttle --delay 5ms -- x", "--delay needs network namespaces"),
        ("--rate 1mbit --throttle --verify -- x", "--verify needs network namespaces"),
        ("--rate 1mbit --throttle --nics 2 -- x", "--nics needs network namespaces"),
        ("--rate 1mbit --nics 0 -- x", "nics=0"),
        ("--rate 1mbit", "no command"),
        ("--rate 1mbit --", "no command"),
    ],
)
def test_a_mistake_is_refused(monkeypatch, options, says):
    monkeypatch.setattr(sys, "argv", ["cluster", *options.split()])
    with pytest.raises(UserError, match=says) as refusal:
        launch.main()
    assert "\n" not in str(refusal.value)


def test_a_refusal_is_one_line(mistake: Mistakes):
    said = mistake("bench.cluster", "--rate", "fast", "--", "x")
    assert said.startswith("error: rate='fast'") and said.count("\n") == 1


def test_missing_iproute2_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nodes, "SBIN", str(tmp_path))
    with pytest.raises(UserError, match="install iproute2, or run with --throttle"):
        require_namespaces()


def test_a_kernel_that_refuses_is_quoted(monkeypatch, tmp_path):
    for name in ("ip", "tc", "unshare"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{name}: not on this machine' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="unshare: not on this machine.*--throttle"):
        require_namespaces()


def test_throttled_command_gets_all_ranks_and_the_rate(monkeypatch, capfd):
    monkeypatch.setattr(launch, "TORCHRUN", (sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)"))
    asked = launch.Launch(rate="0.2gbit", nodes=3, ranks_per_node=2, throttle=True)
    assert launch.throttled(asked, ["-m", "x"]) == 7
    link, argv = capfd.readouterr().out.splitlines()
    assert link == "link: throttled in software to 200 Mbit/s, 6 ranks on loopback"
    assert argv == str(["--standalone", "--nproc-per-node=6", "-m", "x", "--link_mbit", "200"])


def test_the_switch_reads_the_destination():
    def leaves_by(address: bytes) -> list[int]:
        return list(targets(bytes(VNET_HEADER) + address + bytes(60), source=1, count=4))

    assert leaves_by(b"\x02\0\0\0\0\x03") == [2]
    assert leaves_by(b"\xff" * 6) == [0, 2, 3]  # a broadcast
    assert leaves_by(b"\x02\0\0\0\0\x09") == leaves_by(b"\x06\0\0\0\0\x01") == []
    second = bytes(VNET_HEADER) + b"\x02\0\0\0\1\x03" + bytes(60)  # of another network
    assert list(targets(second, source=5, count=4)) == [6] and not targets(second, source=1, count=4)
    assert list(targets(bytes(VNET_HEADER) + b"\xff" * 6, source=5, count=4)) == [4, 6, 7]
