"""The emulated cluster: its command line, and real processes; with the root marker, real namespaces and links."""

import os
import signal
import socket
import struct
import threading
import time

import pytest
import torch.distributed as dist

from bench.cluster import Cluster, hold_port, nodes, require_namespaces
from bench.cluster.guard import members
from core import UserError
from tests.bench.emulated import WORKER, assert_gone, network, python, script, worker


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


# -- real processes ---------------------------------------------------------------------------------------------------


def test_a_held_port_is_given_to_nobody_but_the_server_that_names_it():
    with hold_port() as held, socket.create_server(("", 0)) as other, socket.socket() as client:
        port = held.getsockname()[1]
        only = struct.pack("I", port | port << 16)  # IP_LOCAL_PORT_RANGE: from this port to this port
        try:
            client.setsockopt(socket.IPPROTO_IP, 51, only)
        except OSError:
            pytest.skip("this kernel has no IP_LOCAL_PORT_RANGE (Linux 6.3)")
        with pytest.raises(OSError, match="Cannot assign requested address"):
            client.connect(("127.0.0.1", other.getsockname()[1]))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="Address already in use"):
            client.bind(("", 0))
        assert dist.TCPStore("127.0.0.1", port, 1, is_master=True).port == port


@pytest.mark.slow
def test_ranks_without_a_cluster(tmp_path):
    """Results in rank order, a UserError as it is, another error with its traceback, the limit, and an early end."""
    code = """
        import multiprocessing, os, time, torch, torch.distributed as dist
        from bench.cluster import nodes, run_ranks
        from core import UserError

        nodes.GRACE = 0.2

        def total(x):
            dist.init_process_group("gloo")
            tensor = torch.tensor([x * 10.0 ** int(os.environ["RANK"])])
            dist.all_reduce(tensor)
            return tensor.item(), os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["GLOO_SOCKET_IFNAME"]

        def fails(error):
            if os.environ["RANK"] == "2":
                raise error
            time.sleep(60)

        expected = [(3333.0, str(r), str(r % 2), "lo") for r in range(4)]
        assert run_ranks(total, None, 2, 2, 3.0, timeout=30) == expected
        cases = [(UserError("too big"), UserError, "too big"), (KeyError("k"), RuntimeError, "rank 2:")]
        for error, kind, text in cases:
            try:
                run_ranks(fails, None, 4, 1, error, timeout=30)
            except kind as raised:
                assert str(raised).startswith(text), raised
            else:
                raise AssertionError("no error")
        try:
            run_ranks(time.sleep, None, 1, 2, 60, timeout=0.5)
        except TimeoutError as raised:
            assert "rank 0, 1 still running" in str(raised)
        began = time.monotonic()
        asked = iter([False, True])
        assert run_ranks(time.sleep, None, 1, 2, 60, timeout=50, until=lambda: next(asked)) == []
        assert time.monotonic() - began < 40 and not multiprocessing.active_children()
        print("all well")
    """
    assert script(tmp_path, code) == "all well\n"


# -- real namespaces ---------------------------------------------------------------------------------------------


@pytest.fixture
def root():
    try:
        nodes.tool("ip"), nodes.tool("tc")
    except UserError as error:
        pytest.skip(str(error))
    if os.geteuid() != 0:
        pytest.skip("not root: the tests of the emulated cluster make namespaces")


@pytest.mark.root
def test_ranks_sit_in_their_nodes_and_gloo_takes_the_time_that_the_rate_gives(root, tmp_path):
    """A ring all-reduce sends 2 (n-1)/n bytes a byte: 4 MB on 4 nodes take 0.48 s at 100 Mbit/s, half of it at 200."""
    code = """
        import os, time, torch, torch.distributed as dist
        from bench.cluster import Cluster, run_ranks

        def seconds():
            dist.init_process_group("gloo")
            took = []
            for _ in range(3):
                dist.barrier()
                start = time.monotonic()
                dist.all_reduce(torch.ones(1_000_000))
                took.append(time.monotonic() - start)
            dist.barrier()
            return min(took)

        def where():
            return os.readlink("/proc/self/ns/net"), os.environ["LOCAL_RANK"], os.environ["GLOO_SOCKET_IFNAME"]

        with Cluster(4, 100) as cluster:
            a, b, c, d = run_ranks(where, cluster, 2, 2, timeout=30)
            assert a[0] == b[0] != c[0] == d[0] and os.readlink("/proc/self/ns/net") not in (a[0], c[0])
            assert [x[1:] for x in (a, b, c, d)] == [("0", "e0"), ("1", "e0")] * 2
            slow = max(run_ranks(seconds, cluster, 1, 4, timeout=30))
            cluster.set_rate(200)
            fast = max(run_ranks(seconds, cluster, 1, 4, timeout=30))
        print(slow, fast)
    """
    slow, fast = map(float, script(tmp_path, code).split())
    assert 0.9 * 0.48 < slow < 1.35 * 0.48 and 0.9 * 0.24 < fast < 1.35 * 0.24


@pytest.mark.root
def test_a_short_message_takes_its_time_after_the_link_was_idle(root):
    """What the bucket lets through at once is a small part of a short all-reduce, such as 250 kB over int4."""
    assert [nodes.burst_bytes(rate) for rate in (1, 10, 40, 100, 1000)] == [32e3, 32e3, 62.5e3, 156.25e3, 256e3]
    with Cluster(2, 10) as cluster:
        server = cluster.inside(1, lambda: socket.create_server((cluster.address(1), 0)))
        client = cluster.inside(0, socket.socket)
        client.connect(server.getsockname())
        stream, _ = server.accept()
        with server, client, stream:
            time.sleep(0.3)  # fills the bucket
            start, left = time.monotonic(), 250_000
            sender = threading.Thread(target=client.sendall, args=(bytes(left),), daemon=True)
            sender.start()
            while left:
                left -= len(stream.recv(left))
            assert time.monotonic() - start > 0.8 * 0.2


@pytest.mark.root
def test_two_clusters_at_once_have_their_own_rates(root):
    with Cluster(2, 40) as slow, Cluster(2, 80) as fast:
        assert slow.verify() == pytest.approx(40, rel=0.1) and fast.verify() == pytest.approx(80, rel=0.1)
        slow.set_rate(120)
        assert slow.verify() == pytest.approx(120, rel=0.1)
        slow.rate_mbit = 60  # a link that is not what it says is refused
        with pytest.raises(UserError, match="over 10 % off the 60"):
            slow.verify()


@pytest.mark.root
def test_an_exception_leaves_nothing(root):
    with pytest.raises(KeyError), Cluster(2, 100) as cluster:
        sleeper = cluster.popen(1, ["sh", "-c", "sleep 300 & sleep 300"])
        held = [os.dup(namespace) for namespace in cluster._namespaces]
        while len(members(held)) < 3:  # the shell and both its children
            time.sleep(0.01)
        raise KeyError
    assert sleeper.returncode == -signal.SIGKILL and members(held) == []
    for namespace in held:
        os.close(namespace)


@pytest.mark.root
@pytest.mark.parametrize(
    "mode, sent, status",
    [
        ("pass", None, 0),
        ("fail", None, 1),
        ("crash", None, 1),
        ("sleep", signal.SIGTERM, 143),
        ("sleep", signal.SIGINT, 130),
        ("stubborn", signal.SIGKILL, -9),
    ],
)
def test_nothing_is_left_and_the_status_tells(root, tmp_path, mode, sent, status):
    before = network()
    with worker(tmp_path, mode) as process:
        nodes = {(tmp_path / f"started{rank}").read_text() for rank in range(2)}
        assert len(nodes) == 2  # a namespace each
        if sent:
            process.send_signal(sent)
        out, err = process.communicate(timeout=50)
        assert process.returncode == status, err
        assert_gone(tmp_path, process.pid)
    assert network() == before
    assert "link: 2 nodes, 100 Mbit/s each way, network namespaces + tbf\n" in out
    assert mode != "pass" or "rank 0 of 2 ends" in out
    assert mode != "fail" or "[node 1] rank 1 has had enough" in err


@pytest.mark.root
def test_a_second_signal_kills(root, tmp_path):
    with worker(tmp_path, "stubborn") as process:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
        assert_gone(tmp_path, process.pid)


@pytest.mark.root
def test_a_user_who_may_make_a_user_namespace_only(root, tmp_path):
    """As whom the kernel refuses the first try, which has the rights of root."""
    refuses = f'if [ "$1" = -n ] && mkdir {tmp_path}/refused; then exit 1; fi'
    (tmp_path / "unshare").write_text(f'#!/bin/sh\n{refuses}\nexec {nodes.tool("unshare")} "$@"\n')
    (tmp_path / "unshare").chmod(0o755)
    (tmp_path / "worker.py").write_text(WORKER)
    command = ["--nodes", "2", "--rate", "100mbit", "--verify", "--", tmp_path / "worker.py", "pass", tmp_path]
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = python("-m", "bench.cluster", *command, skips=True, PATH=path)
    assert "link: measured" in said and "rank 0 of 2 ends" in said and (tmp_path / "refused").exists()
