"""Starts the workers of an elastic run on one node, and starts them again after their death:

    python -m co2_training.elastic.launch --nproc-per-node 4 --max-restarts 3 train.py

In a clone, the package is core. Run the same line on each node, with --nnodes, --node-rank and the first node's
--master-addr and --master-port. A restarted worker has a new name, RANK.RESTARTS, and the place of the lost one.

Each node's launcher ends a worker that is silent for its timeout, and writes to the store which workers are alive. With
--per-node, several ranks of a node are one worker, which ends and restarts as a whole (island.py). The first node's
launcher serves the store and lists the generations (members.py). The run ends with this launcher. With --store
etcd://..., etcd keeps the store, and any launcher may be lost: the holder of a lease lists the generations.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import REMAINDER, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.run import determine_local_world_size

from ..errors import CollectiveError, UserError
from .allreduce import MOST
from .etcd import Election, EtcdStore, NotLeading
from .members import BEAT
from .sealed import SECRET, SealedStore

POLL = 0.02  # seconds between two checks of the workers
SILENCE = 15.0  # seconds without a sign of life after which a node's launcher counts as lost
OF_A_GENERATION = ("came", "report", "group")  # kinds of keys, by generation and worker
PATIENCE = 60.0  # seconds for workers to save and end after a signal


def say(text: str) -> None:
    """Prints a line on standard error. A lost stream ends no run."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


class Coordinator:
    """Lists the generations of workers of some nodes, in the first node's launcher.

    With etcd, each launcher has one, and the elected one lists. etcd refuses its writes after it has lost the election.

    Args:
        store: The store.
        nodes: Number of nodes.
        etcd: The store below `store`, for this coordinator only.
        node: Number of this node.
    """

    def __init__(self, store: SealedStore, nodes: int, etcd: EtcdStore | None = None, node: int = 0):
        self.store, self.nodes, self.generation = store, nodes, 0
        self.election = Election(etcd, str(node), self._take_over) if etcd else None
        self._tells_at = time.monotonic() + SILENCE  # when it says that a node is missing
        self._take_over()

    def _take_over(self) -> None:
        """Continues from the last generation, if any. Nodes count as alive until they are silent for SILENCE s."""
        while self.store.has(f"generation/{self.generation + 1}"):
            self.generation += 1
        self.members: list[str] = self.store.read(f"generation/{self.generation}", {"names": []})["names"]
        # silent workers, which their launchers end; they never count as alive again
        self.out: list[str] = self.store.read("out", [])
        self._waits_since: float | None = None  # start of the wait for members to come to the next generation
        self._beats: dict[int, tuple[int, float]] = {}  # each node's last beat, and when it was seen

    def look(self) -> None:
        """Lists the next generation if it is due, unless another launcher does."""
        if self.election is None:
            return self._look()
        try:
            if self.election.leads():
                self._look()
        except NotLeading:
            self.election.lose()

    def _look(self) -> None:
        if (alive := self.alive()) is None:
            return
        alive = [name for name in alive if name not in self.out]
        members = [name for name in self.members if name in alive]
        ready = [name for name in alive if name not in self.members and self.store.has(f"ready/{name}")]
        if not members:  # at the start, or after all were lost
            if not ready or self.store.has("over"):
                self._waits_since = None
            elif len(ready) == len(alive):
                self._list(sorted(ready, key=lambda name: [*map(int, name.split("."))]), planned=True)
            elif self._waits_too_long():
                self._leave_out({*alive} - {*ready})
            return
        if len(members) < len(self.members):
            self.store.set(f"broken/{self.generation}", "")
        if ready:
            self.store.set(f"waiting/{self.generation}", "")
        keys = {name: f"came/{self.generation}/{name}" for name in members}
        came = {name: self.store.get(key).decode() for name, key in keys.items() if self.store.has(key)}
        if came and self._waits_too_long() and (silent := {*members} - {*came}):
            self._leave_out(silent)
        elif came and len(came) == len(members):
            holders = [name for name, kind in came.items() if kind != "empty"]
            planned = all(came[name] == "planned" for name in holders)
            empty = [name for name in came if name not in holders]
            self._list(holders + (empty + ready if planned else []), planned)

    def _waits_too_long(self) -> bool:
        now = time.monotonic()
        self._waits_since = now if self._waits_since is None else self._waits_since
        return now - self._waits_since > float(self.store.get("patience"))

    def _leave_out(self, silent: set[str]) -> None:
        """Lets the launchers end silent workers, which count as lost from the next look on."""
        self.out += sorted(silent)
        self.store.set("out", json.dumps(self.out))

    def _list(self, names: list[str], planned: bool) -> None:
        self.generation, self.members, self._waits_since = self.generation + 1, names, None
        self.store.set(f"generation/{self.generation}", json.dumps({"names": names, "planned": planned}))
        if self.election:
            for kind in OF_A_GENERATION:  # its workers have left it
                self.election.store.delete_below(f"elastic/{kind}/{self.generation - 2}/")

    def alive(self) -> list[str] | None:
        """Returns the names of the workers that are alive, or None until all nodes have started theirs."""
        alive: list[str] = []
        for node in range(self.nodes):
            if (told := self.store.read(f"node/{node}", None)) is None:
                if time.monotonic() > self._tells_at:
                    say(f"waiting for the launcher of node {node} (--node-rank {node})")
                    self._tells_at = math.inf
                return None
            beat, seen = self._beats.get(node, (-1, 0.0))
            if told["beat"] != beat:
                self._beats[node] = told["beat"], (seen := time.monotonic())
            if time.monotonic() - seen < SILENCE:
                alive += told["alive"]
        return alive


class Agent:
    """One node's launcher, with its workers and their restarts.

    Args:
        spawn: Starts a rank with these environment variables. Returns its process, as subprocess.Popen does.
        workers: Number of ranks on each of the `nodes`, of which `island` consecutive ones are a worker.
        restarts: How often each worker is restarted.
        host: Address of the store, which the first node serves at `port`; 0 for any.
        etcd: URL of an EtcdStore to use instead. No launcher must then live longer than the run.
    """

    def __init__(
        self,
        spawn: Callable[[dict[str, str]], Any],
        workers: int,
        restarts: int = 0,
        *,
        node: int = 0,
        nodes: int = 1,
        host: str = "127.0.0.1",
        port: int = 0,
        etcd: str = "",
        island: int = 1,
    ):
        if island < 1 or workers % island:
            raise UserError(f"per_node={island} does not divide the {workers} ranks of a node: change --nproc-per-node")
        self.spawn, self.workers, self.restarts, self.node, self.nodes = spawn, workers, restarts, node, nodes
        self.island = island
        try:
            if etcd:
                self._served: Any = EtcdStore(etcd, node)
            else:
                self._served = _serve(host, port, alone=nodes == 1) if node == 0 else _store(host, port)
            self._served.check([""])
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0]
            remedy = "start etcd first" if etcd else "give --master-addr and a free --master-port of the first node"
            raise UserError(f"no store at {etcd or f'{host}:{port}'} ({reason}): {remedy}") from None
        self._secret = os.environ.get(SECRET) or ("" if etcd or nodes > 1 else secrets.token_hex())
        self.store = self._sealed(self._served)
        if etcd:
            self.store.compare_set("launcher", "", "here")
        elif node == 0:
            self.store.set("launcher", "here")
        self.store.get("launcher")  # raises for another secret
        own = EtcdStore(etcd, node) if etcd else None
        lists = etcd or node == 0
        self.coordinator = Coordinator(self._sealed(own or self._served), nodes, own, node) if lists else None
        self.processes: dict[int, Any] = {}  # by slot, a rank's place on this node
        self.started = [0] * (workers // island)  # restarts of each worker
        self._failed: dict[int, int] = {}  # the first status of each worker of which a rank has failed
        self.status, self.signalled, self._beat = 0, 0, 0
        self._beats: dict[str, tuple[bytes, float]] = {}  # each rank's last beat, and seconds since it was seen
        self._heard_at = time.monotonic()  # when the beats were read
        if etcd:
            if self.store.has("over"):
                raise UserError(f"--store {etcd}: the run of this name has ended: give another name")
            if told := self.store.read(f"node/{node}", None):  # a launcher of this node was lost: no name is used twice
                self.started = [n + 1 for n in told["started"]]
        self._poll = 10 * POLL if etcd else POLL
        self.finished = False  # whether a worker has finished the run
        self._ends_them = False  # whether the launcher itself kills the remaining workers
        self._deadline = math.inf
        self._folder = tempfile.TemporaryDirectory()

    def _sealed(self, store: Store) -> SealedStore:
        return SealedStore(PrefixStore("elastic", store), self._secret)

    def run(self) -> int:
        """Runs until all workers have ended. Returns the exit status, 0 if a worker has finished the run."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for worker in range(len(self.started)):
                self._start(worker)
            election = self.coordinator and self.coordinator.election
            # the launcher that serves the store outlives the workers of all nodes that have come
            while self.processes or (self.coordinator and not election and self.coordinator.alive()):
                self.look()
                time.sleep(self._poll)
            if election:
                election.resign()
        finally:
            for process in self.processes.values():
                process.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
            self._folder.cleanup()
        if self.signalled:
            return 128 + self.signalled
        if not self.finished and self.coordinator and self.status != 2 and not self.coordinator.alive():
            remedy = "resume from the newest checkpoint (a train script's --resume), or give --max-restarts"
            say(f"error: no worker is left, and none came to the run's end: {remedy}")
        return 0 if self.finished else self.status

    def look(self) -> None:
        """Restarts workers that have died, ends silent ones, and lists the next generation if it is due."""
        out = self._silent() | {*self.store.read("out", [])}
        for ranks in self._ranks_of.values():
            running = [self.processes[slot] for slot in ranks if self.processes[slot].poll() is None]
            if running and (name := self.name(ranks[0])) in out:
                say(f"worker {name} was silent for too long (its timeout): ending it")
                for process in running:
                    process.kill()
        for slot, process in list(self.processes.items()):
            if process.poll() is not None:
                del self.processes[slot]
                self._ended(slot, process.returncode)
        if time.monotonic() > self._deadline:
            for name in sorted({self.name(slot) for slot in self.processes}):
                say(f"worker {name} did not end in time: ending it")
            self._deadline, self._ends_them = math.inf, True
            self._send_all(signal.SIGKILL)
        self._beat += 1
        names = [self.name(ranks[0]) for ranks in self._ranks_of.values() if len(ranks) == self.island]
        told = {"beat": self._beat, "alive": names, "started": self.started}
        self.store.set(f"node/{self.node}", json.dumps(told))
        if self.coordinator:
            self.coordinator.look()

    def _silent(self) -> set[str]:
        """Returns the workers whose last beat is older than their timeout. Stops of this launcher do not count."""
        now, silent = time.monotonic(), set[str]()
        passed = min(now - self._heard_at, 2 * BEAT)
        if passed < BEAT:
            return silent
        before, self._beats, self._heard_at = self._beats, {}, now
        for slot in self.processes:
            if self.store.has(key := self._beat_of(slot)):
                beat, (last, since) = self.store.get(key), before.get(key, (b"", 0.0))
                self._beats[key] = beat, (since := since + passed if beat == last else 0.0)
                silent |= {self.name(slot)} if since > float(self.store.get("patience")) else set()
        return silent

    def name(self, slot: int) -> str:
        """Returns the name of the worker that was started last in a slot."""
        worker = slot // self.island
        return f"{self.node * len(self.started) + worker}.{self.started[worker]}"

    def _beat_of(self, slot: int) -> str:
        """Returns the key under which a rank writes its beats, see Members."""
        return f"beat/{self.name(slot)}.{slot}"

    @property
    def _ranks_of(self) -> dict[int, list[int]]:
        """The slots whose ranks live, by worker."""
        return {k: [*of] for k, of in itertools.groupby(sorted(self.processes), lambda slot: slot // self.island)}

    def _ended(self, slot: int, status: int) -> None:
        over = self.store.has("over")
        if status == 0 and (over or not self.store.has(self._beat_of(slot))):  # or a dry run
            if over and not self.finished:  # others end soon, unless they are stopped
                self._deadline = min(self._deadline, time.monotonic() + float(self.store.get("patience")))
            self.finished = True
            return
        if status == 0:
            say(f"worker {self.name(slot)} ended before the run's end")
            status = 1
        self.status = self.status or (status if status > 0 else 128 - status)
        if status == 2 and not self.finished:  # a user's mistake: all workers make it, or wait for this one
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the worker's last line, if any
                said = json.loads(self._error_file(slot).read_text())["message"]["message"]
                if not self._ends_them:  # otherwise another worker has said so
                    say(said)
            self.restarts, self._ends_them = 0, True
            self._send_all(signal.SIGKILL)
        worker = slot // self.island
        self._failed.setdefault(worker, status)
        if rest := self._ranks_of.get(worker):  # the last one restarts it
            for other in rest:
                self.processes[other].kill()
            return
        status = self._failed.pop(worker)
        if not (over or self.signalled) and self.started[worker] < self.restarts:
            say(f"worker {self.name(slot)} died (status {status}): restarting it")
            self.started[worker] += 1
            self._start(worker)
        elif status < 0 and not (self.signalled or self._ends_them):  # the worker itself printed nothing
            say(f"worker {self.name(slot)} was killed by signal {-status}")

    def _start(self, worker: int) -> None:
        for slot in range(worker * self.island, (worker + 1) * self.island):
            env = {"RANK": self.node * self.workers + slot, "WORLD_SIZE": self.nodes * self.workers}
            env |= {"LOCAL_RANK": slot, "LOCAL_WORLD_SIZE": self.workers, "CO2_WORKER": self.name(slot)}
            env["CO2_STORE"] = url = getattr(self._served, "url", "")
            env |= {} if url else {"MASTER_ADDR": self._served.host, "MASTER_PORT": self._served.port}
            env |= {SECRET: self._secret, "CO2_ISLAND": self.island}
            env |= {"CO2_LAUNCH": 1, "TORCHELASTIC_ERROR_FILE": self._error_file(slot)}  # _ended prints what is there
            # as torchrun, so that workers say a line once, and init_process_group() works where CO2 then refuses it
            env |= {"TORCHELASTIC_RUN_ID": "elastic", "TORCHELASTIC_USE_AGENT_STORE": True}
            self.processes[slot] = self.spawn({name: str(value) for name, value in env.items()})

    def _error_file(self, slot: int) -> Path:
        (folder := Path(self._folder.name, f"{self.name(slot)}.{slot}")).mkdir(exist_ok=True)
        return folder / "error.json"

    def _send_all(self, number: int) -> None:
        for process in self.processes.values():
            process.send_signal(number)

    def _on_signal(self, number: int, _: Any) -> None:
        """Passes a signal on, so that the run is saved. A second signal, over 2 s later, kills the workers."""
        now = time.monotonic()
        again = self.signalled and now > self._deadline - PATIENCE + 2
        if not self.signalled:
            self.signalled, self._deadline = number, now + PATIENCE
        self._send_all(signal.SIGKILL if again else number)


def _serve(host: str, port: int, *, alone: bool) -> TCPStore:
    """Returns the store. It listens only at `host` if that is this machine's own address and other nodes can reach it.

    An address behind NAT is not this machine's own. Other nodes, unless this one is alone, cannot reach 127.0.1.1.
    """
    own: dict[str, Any] = {}
    try:
        listening = socket.create_server((host, port))
        address, port = listening.getsockname()
        if address.startswith("127.") and not alone:
            listening.close()
        else:  # in torch 2.6 and 2.7 libuv, the default backend, does not accept a socket that already listens
            own = {"master_listen_fd": listening.detach(), "use_libuv": False}
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    return _store(host, port, is_master=True, **own)


def _store(host: str, port: int, **options: Any) -> TCPStore:
    within = timedelta(seconds=300)
    return TCPStore(host, port, None, timeout=within, wait_for_workers=False, **options)


def parsed(arguments: Sequence[str] | None) -> Namespace:
    """Returns the launcher's options, which are named as torchrun's."""
    parser = ArgumentParser(
        f"python -m {__package__}.launch", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.error, add = refuse, parser.add_argument
    add("--nproc-per-node", default="1", help="ranks on this node, or gpu for one per GPU (default: 1)")
    add("--per-node", type=int, default=1, help="ranks of each worker; 0 means all of a node (default: 1)")
    add("--max-restarts", type=int, default=0, help="restarts of each worker (default: 0)")
    add("--nnodes", default="1", help="number of nodes (default: 1)")
    add("--node-rank", type=int, help="number of this node, from 0")
    add("--master-addr", help="address of the first node")
    add("--master-port", type=int, default=29500, help="a free port there (default: 29500)")
    add("--standalone", action="store_true", help="one node, as by default")
    add("--store", default="", help="etcd://HOST,HOST,HOST/RUN: a store that outlives any one machine")
    add("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    add("training_script", metavar="script")
    add("training_script_args", metavar="arguments", nargs=REMAINDER)
    return parser.parse_args(arguments)


def refuse(message: str) -> NoReturn:
    """Raises UserError in place of a parser's error, which prints all options."""
    raise UserError(f"{message}: --help lists the options")


def check_args(args: Namespace) -> None:
    """Raises UserError for numbers that cannot be, hosts without an address, and a script that is not there.

    It accepts this launcher's options and torchrun's. If one node's number and address are None, it fills them in.
    """
    fewest, most = (str(args.nnodes).split(":") * 2)[:2]
    if not (re.fullmatch("[0-9]{1,6}(:[0-9]{1,6})?", str(args.nnodes)) and 0 < int(fewest) <= int(most)):
        raise UserError(f"--nnodes {str(args.nnodes)[:40]}: give a number of nodes, or MIN:MAX")
    ranks = 0
    with contextlib.suppress(ValueError):
        ranks = determine_local_world_size(args.nproc_per_node)
    if not 0 < ranks <= MOST:
        raise UserError(f"--nproc-per-node {args.nproc_per_node[:40]}: give 1 to {MOST}, or gpu where torch finds one")
    if not 0 <= (args.master_port or 0) < 1 << 16:
        raise UserError(f"--master-port {args.master_port}: give 0 to 65535")
    if args.max_restarts < 0:
        raise UserError(f"--max-restarts {args.max_restarts}: give 0 or more")
    endpoint = getattr(args, "rdzv_endpoint", "")
    address = args.master_addr or endpoint or getattr(args, "store", "")
    static = getattr(args, "rdzv_backend", "static") == "static"  # other backends of torchrun number the nodes
    if int(most) > 1 and static and (args.node_rank is None or not address):
        raise UserError(
            f"--nnodes {args.nnodes} needs --node-rank and --master-addr: give on each node its number, from 0, and "
            "the first node's address"
        )
    args.node_rank, args.master_addr = args.node_rank or 0, args.master_addr or "127.0.0.1"
    if not 0 <= args.node_rank < int(most):
        raise UserError(f"--node-rank {args.node_rank}: give 0 to {int(most) - 1}")
    hosts = {"--master-addr": args.master_addr, "--rdzv-endpoint": endpoint.rpartition(":")[0] or endpoint}
    for option, host in hosts.items():
        try:
            socket.getaddrinfo((host or "localhost").strip("[]"), None)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "it is no host name"
            raise UserError(f"{option} {host[:80]}: {why}: give the first node's name or IP address") from None
    script = args.training_script
    if args.module and not is_module(script):
        remedy = "start in the folder that has it, and give the name of a module that python -m runs"
        raise UserError(f"-m {script}: there is no such module; {remedy}")
    if not (args.module or getattr(args, "no_python", False) or Path(script).is_file()):
        raise UserError(f"{script}: there is no such file; give a script, or -m and a module")


def check_free(port: int) -> None:
    """Raises UserError if another program listens at this port of this machine."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UserError(f"--master-port {port}: {os.strerror(error.errno or 0)}: give a free one") from None


def is_module(name: str) -> bool:
    """Returns whether `python -m` would find this module. No module is imported."""
    path, at = None, ""
    for part in (*name.split("."), "__main__"):
        at = f"{at}.{part}".strip(".")
        try:
            spec = next(filter(None, (finder.find_spec(at, path) for finder in sys.meta_path)), None)
        except KeyError:  # a folder without __init__.py in a package, which must be imported to be found
            return True
        if spec is None:
            return False
        if spec.submodule_search_locations is None:
            return at in (name, f"{name}.__main__")
        path = spec.submodule_search_locations
    return False


def run(args: Namespace) -> int:
    """Starts this node's workers. Returns the exit status after all have ended."""
    script = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]

    def spawn(env: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *script], env={"OMP_NUM_THREADS": "1", **os.environ, **env})

    nodes = int(args.nnodes.split(":")[-1])
    where: dict[str, Any] = {"etcd": args.store}
    if nodes > 1:
        where |= {"node": args.node_rank, "nodes": nodes, "host": args.master_addr, "port": args.master_port}
    workers = determine_local_world_size(args.nproc_per_node)
    return Agent(spawn, workers, args.max_restarts, island=args.per_node or workers, **where).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher with these arguments, or the command line's. Returns the exit status."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of the workers: torch prints frames for a lost peer
    try:
        check_args(args := parsed(arguments))
        return run(args)
    except CollectiveError as error:
        say(f"error: {error}")
        return 1
    except (UserError, RuntimeError, ValueError, OSError, AssertionError) as error:
        say(f"error: {(str(error).splitlines() or [repr(error)])[0]}")
        return 2


if __name__ == "__main__":
    if "TORCH_CPP_LOG_LEVEL" not in os.environ and any(arg.startswith("--nnodes") for arg in sys.argv):
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # read when torch is imported: it prints frames for a lost store
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    sys.exit(main())
