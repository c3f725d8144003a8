"""All interleavings, up to a bound, of workers, their launcher and its coordinator over a store in this process.

Members, Agent and Coordinator are the real ones. Each worker is a thread that runs only when the explorer lets it, from
one wait or write to the next. Sums are modeled: an outer iterate is the list of rounds that are merged, each with the
names of the workers whose parts count. By default all run in turn. The explorer tries all schedules with up to `bound`
deviations: a worker dies, stops, goes on, is late, gets an error where others get a sum, or the store is lost.
"""

from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from core.elastic import launch
from core.elastic import members as members_module
from core.elastic.members import AGREED, SENT, SUMMED, Members, Over, agreed
from core.elastic.sealed import DIGEST, SECRET

TIMEOUT, ROUNDS = 10.0, 2
Event = tuple[Any, ...]


class Killed(BaseException):
    """Ends a worker's thread."""


class Store(dict[str, bytes]):
    """The store. Each write of a worker lets others run."""

    host, port, world = "127.0.0.1", 1, SimpleNamespace(down=False)

    def set(self, key: str, value: str) -> None:
        assert not key.startswith("generation/") or key not in self, "one list a generation"
        changed = not self.check([key]) or self[key] != value.encode()
        self[key] = value.encode()
        if changed and key.startswith(("ready", "came", "report")):
            self.world.pause()

    def check(self, keys: list[str]) -> bool:
        if self.world.down:
            raise RuntimeError("no answer")
        return all(key in self for key in keys)


class Worker(Members):
    """A worker's process, as subprocess.Popen shows it. Its training follows ElasticAllReduce and Joining."""

    def __init__(self, world: World, name: str):
        self.world, self.name, self.generation, self.names = world, name, 0, []
        self.returncode: int | None = None
        self.stopped = self.disturbed = self.gone = self.began = False
        self.x, self.life = (
            (),
            0,
        )  # the outer iterate, and the generation in which the run began, again if all were lost
        self.launched, self.phase, self.joining, self.lucky, self.ends = 0, AGREED, False, True, ""
        self.lost = set[int]()  # rounds that the survivors of deaths have lost
        self.group_count = 0  # as torch counts its groups
        self.go, self.thread = threading.Semaphore(0), threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            self.returncode, self.gone = -9, True
            self.leave()

    def send_signal(self, number: int) -> None:  # noqa: ARG002
        self.kill()

    def _run(self) -> None:
        self.go.acquire()
        try:
            if not self.gone:
                super().__init__(self.world.store, self.name, timeout=TIMEOUT)
                self._train()
            self.returncode, self.ends = 0, "well"
        except Over:
            self.returncode, self.ends = 0, "over"
        except RuntimeError as error:
            self.returncode, self.ends = 1, str(error)
        except Killed:
            pass
        except BaseException as error:  # an assertion
            self.world.failure = error
        self.leave()
        self.world.back.release()

    def where(self) -> str:
        """Where it waits, and the local variables that decide how it goes on."""
        frame, found = sys._current_frames().get(self.thread.ident or 0), ""
        while frame is not None and frame.f_code.co_name != "_run":
            if frame.f_code.co_filename in (__file__, members_module.__file__):
                kept = [frame.f_locals.get(name) for name in ("again", "since", "summed", "asks")]
                found += f"{frame.f_lineno} {kept} "
            frame = frame.f_back
        return found

    def _beat(self) -> None:
        """Writes what its thread writes before the next tick of the clock."""
        self.began = True
        self.store.set(f"beat/{self.name}.{self.name.partition('.')[0]}", str(self.world.now))

    def leave(self) -> None:
        self.world.closed.add((self.generation, self.name))

    def _join(self) -> None:
        while True:
            reports = self.meet(None, "empty")
            if all(r is None for r in reports) and self.rank == 0:
                self.life = self.generation
                return self._serve(reports)
            since, sender = self.world.now, next((i for i, r in enumerate(reports) if r is not None), 0)
            while (sent := self.world.states.get(self.generation)) is None:
                self.world.pause()
                if self.world.lost(self.generation, [self.names[sender]]) or self.world.now - since > TIMEOUT:
                    break
            if sent is not None:
                self.launched, self.life, self.x = sent
                return None
            self.leave()

    def _train(self) -> None:
        self._join()
        merged = self.world.merged
        while self.launched < ROUNDS:
            if self.left():
                self._mend("failed")
            while self.joining:
                reports = self._mend("planned")
                known = [r for r in reports if r is not None]
                self.joining = not (self.planned or any(r["launched"] > self.launched for r in known))
                if reports[self.rank] is known[0]:
                    self._serve(reports)
            if (parts := self._round()) is None:
                continue
            assert self.launched not in dict(self.x), "a sum counts once"
            self.x = (*self.x, (self.launched, parts))
            assert self.life >= max((life for life, _ in merged), default=0), "only the latest run advances"
            x, names = merged.setdefault((self.life, self.launched), (self.x, self.names))
            assert x == self.x, "the outer iterates are equal"
            assert {*names} & {*self.names}, "no two disjoint groups advance"
        while self._round() is None:  # no worker ends before all have merged the last round
            pass
        self.end()

    def _serve(self, reports: list[Any]) -> None:
        if None in reports:
            self.world.states[self.generation] = self.launched, self.life, self.x
            self.world.pause()

    def _mend(self, came: Any) -> list[Any]:
        reports = self.meet({"launched": self.launched, "launched_phase": self.phase}, came)
        latest = max((r["launched"] for r in reports if r is not None), default=self.launched)
        self.lost |= set() if agreed(reports, "launched", latest) else {latest}
        self.phase = AGREED
        return reports

    def _round(self) -> str | None:
        """The names of all that count in the round; None if it is lost."""
        self.launched += 1
        if self.launched in self.lost:  # for the others, and so for this one
            return None
        summed = self._sum("sum", self.rank == 0 and self.wanted())
        self.phase = SENT if summed is None else SUMMED
        if summed is None or self._sum("token", False) is None:
            self._mend("failed")
            if self.launched in self.lost:
                return None
        assert summed is not None, "whoever goes on from a sum has it"
        self.phase, self.joining = AGREED, self.joining or summed[1]
        return summed[0]

    def _sum(self, kind: str, asks: bool) -> tuple[str, bool] | None:
        """The names of all that have sent, and whether one of them asks; None after an error."""
        posts = self.world.posts.setdefault((self.generation, self.launched, kind), {})
        posts[self.name], since = asks, self.world.now
        self.phase = SENT if kind == "sum" else SUMMED
        while True:
            self.world.pause()
            lost = self.world.lost(self.generation, self.names)
            if len(posts) == len(self.names) and (self.lucky or not lost):
                return ",".join(sorted(posts)), any(posts.values())
            if lost or self.left() or self.world.now - since > TIMEOUT:
                return None


class Groups:
    """torch's count of groups, which each process has for itself."""

    def __init__(self, world: World):
        vars(self)["world"] = world

    def __setattr__(self, name: str, value: int) -> None:
        setattr(self.world.running(), name, value)


class World:
    """One execution."""

    def __init__(self, workers: int, restarts: int, monkeypatch: pytest.MonkeyPatch):
        self.now, self.turn, self.down, self.failure = 0.0, 0, False, None
        self.back, self.store = threading.Semaphore(0), Store()
        self.store.world = self
        self.closed: set[tuple[int, str]] = set()  # (generation, name) of whoever has left a generation's group
        self.posts: dict[Any, dict[str, bool]] = {}
        self.states: dict[int, Any] = {}  # what is sent to newcomers, by generation
        self.formed: dict[tuple[int, int], set[str]] = {}
        self.merged: dict[tuple[int, int], Any] = {}
        self.workers: list[Worker] = []
        self.listed, self.out = list[list[str]](), set[str]()
        time = SimpleNamespace(sleep=lambda _: self.pause(), monotonic=lambda: self.now)
        dist = SimpleNamespace(init_process_group=self.form, group=SimpleNamespace(WORLD=""))
        dist.PrefixStore = lambda _, store: store
        fakes = {"time": time, "dist": dist, "PrefixStore": dist.PrefixStore, "print": lambda *_, **__: None}
        fakes["WORLD"] = Groups(self)
        fakes |= {"set_timeout": lambda *_, **__: ""}
        fakes["threading"] = SimpleNamespace(Thread=lambda target: SimpleNamespace(start=target))
        fakes |= {"BEAT": TIMEOUT + 1, "_serve": lambda *_, **__: self.store}
        for name, fake in fakes.items():
            for module in (launch, members_module):
                monkeypatch.setattr(module, name, fake, raising=False)
        monkeypatch.setenv(SECRET, "secret")
        self.agent = launch.Agent(lambda env: self.spawn(env["CO2_WORKER"]), workers, restarts)
        for slot in range(workers):
            self.agent._start(slot)

    def spawn(self, name: str) -> Worker:
        assert name not in [worker.name for worker in self.workers], "a name is used once"
        self.workers.append(Worker(self, name))
        return self.workers[-1]

    def lost(self, generation: int, names: list[str]) -> bool:
        return any((generation, name) in self.closed for name in names)

    def pause(self) -> None:
        """A worker lets the explorer choose who goes on."""
        for worker in self.workers:
            if threading.current_thread() is worker.thread:
                self.back.release()
                worker.go.acquire()
                if worker.gone:
                    raise Killed

    def form(self, *_: Any, **__: Any) -> None:
        """Connects a generation: all of it must come."""
        me, since = self.running(), self.now
        formed = self.formed.setdefault((me.generation, me.group_count), set())
        formed.add(me.name)
        me.group_count += 1
        while len(formed) < len(me.names):
            if self.lost(me.generation, me.names) or self.now - since > TIMEOUT:
                raise RuntimeError("a worker does not come")
            self.pause()
        me.group_count = 0  # as leaving the group sets it

    def running(self) -> Worker:
        return next(worker for worker in self.workers if threading.current_thread() is worker.thread)

    def happen(self, kind: str, who: int | None = None) -> None:
        self.turn += kind in ("look", "step", "late")
        if kind == "tick":
            self.now += launch.BEAT
            for worker in self.workers:
                if worker.began and worker.returncode is None and not worker.stopped and not self.down:
                    worker._beat()
        self.down = self.down or kind == "lost"
        if kind == "look" and not self.down:
            self.agent.look()
            self._check_lists()
        if who is None:
            return
        worker = self.workers[who]
        if kind == "die":
            worker.kill()
        elif kind in ("stop", "go on"):
            worker.stopped, worker.disturbed = kind == "stop", True
        elif worker.returncode is None and not worker.stopped:
            worker.lucky = kind == "step"
            worker.go.release()
            self.back.acquire()
        if self.failure:
            raise self.failure

    def deviations(self) -> list[Event]:
        alive = [(i, worker.stopped) for i, worker in enumerate(self.workers) if worker.returncode is None]
        kinds = [(kind, i) for i, stopped in alive for kind in ("die", "go on" if stopped else "stop", "unlucky")]
        return kinds if self.down else [("late",), ("lost",), *kinds]

    def _check_lists(self) -> None:
        while (key := f"generation/{len(self.listed) + 1}") in self.store:
            came = f"came/{len(self.listed)}"
            self.out |= {
                name for name in [n for n in self.listed[-1:] for n in n] if f"{came}/{name}" not in self.store
            }
            self.listed.append(json.loads(self.store[key][DIGEST:])["names"])
            assert not self.out & {*self.listed[-1]}, "whoever was left out comes back under a new name only"
        assert self.agent.coordinator and len(self.listed) == self.agent.coordinator.generation, "they rise by one"
        assert len(self.store) <= 10 + 16 * (1 + len(self.listed)), "keys are bounded"

    def key(self) -> str:
        """All that the execution's future depends on."""
        kept = (
            "returncode",
            "stopped",
            "generation",
            "names",
            "launched",
            "life",
            "phase",
            "lost",
            "joining",
            "x",
            "group_count",
        )
        workers = [([getattr(w, name) for name in kept], w.where()) for w in self.workers]
        values = {k: v for k, v in self.store.items() if not k.startswith("node/")}
        leader = {k: v for k, v in vars(self.agent.coordinator).items() if k not in ("store", "_beats")}
        sets = [sorted(self.closed), sorted(self.out), {n: sorted(names) for n, names in self.formed.items()}]
        rest = (self.now, self.down, self.agent.started, self.agent._beats, self.posts, self.states, self.merged)
        return str((sorted(values.items()), workers, leader, sets, rest))

    def check_end(self) -> None:
        for worker in self.workers:
            ends = not worker.began or (self.down and worker.stopped)  # the launcher kills it when the store is lost
            assert worker.returncode is not None or ends, f"worker {worker.name} waits for ever"
            if not (worker.gone or worker.disturbed or self.down):
                assert worker.ends in ("well", "over"), f"worker {worker.name} lives, and ends with: {worker.ends}"
        assert self.down or not (self.agent.finished and self.agent.processes), "the launcher waits for ever"


def explore(workers: int, restarts: int, bound: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tries all executions with up to `bound` deviations; their number."""
    seen: dict[int, int] = {}
    todo: list[tuple[list[Event], int]] = [([], bound)]
    executions = 0
    while todo:
        events, left = todo.pop()
        executions += 1
        world, quiet, ticks = World(workers, restarts, monkeypatch), 0, 0
        try:
            for event in events:
                world.happen(*event)
            key = world.key()
            while ticks < 4:
                assert len(events) < 1000, "the workers meet again and again"
                turn = world.turn % (len(world.workers) + 1)
                if seen.get(hash((key, turn)), -1) < left:
                    seen[hash((key, turn))] = left
                    todo += [([*events, event], left - 1) for event in world.deviations() if left]
                elif quiet == 0:
                    break  # it goes on as one before
                event = ("tick",) if quiet > len(world.workers) else ("step", turn - 1) if turn else ("look",)
                events = [*events, event]
                world.happen(*event)
                before, key = key, world.key()
                quiet = 0 if key != before else quiet + 1
                ticks = ticks + 1 if event == ("tick",) else 0 if key != before else ticks
            else:
                world.check_end()
        except AssertionError as error:
            raise AssertionError(f"{error}, after {[e for e in events if e[0] not in ('look', 'step')]}") from error
        finally:
            for worker in world.workers:
                worker.gone = True
                worker.go.release()
                worker.thread.join()
    return executions


SLOW = [pytest.param(*bounds, marks=pytest.mark.slow) for bounds in ((3, 1, 1), (3, 0, 1), (2, 0, 2))]


@pytest.mark.parametrize(("workers", "restarts", "bound"), [(2, 1, 1), (1, 1, 1), *SLOW])
def test_all_schedules(workers: int, restarts: int, bound: int, monkeypatch: pytest.MonkeyPatch):
    assert explore(workers, restarts, bound, monkeypatch) > 100
