"""All interleavings, up to a bound, of workers, their launcher and its coordinator over a store in this process.

Members, Agent and Coordinator are the real ones. Each worker is a thread that runs only when the explorer lets it, from
one wait or write to the next. Sums are modeled: a worker's outer iterate is the list of rounds it has merged, each with
the names of the workers whose parts count. By default all run in turn. The explorer tries all schedules with up to
`bound` deviations: a worker dies, stops, goes on, is late, or gets an error where others get a sum, or the store is
lost.
"""

from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from core.elastic import members as members_module
from core.elastic.members import AGREED, SENT, SUMMED, Members, Over, agreed
from training import launch

TIMEOUT, ROUNDS = 10.0, 2
Event = tuple[Any, ...]


class Killed(BaseException):
    """Ends a worker's thread."""


class Store:
    """The store. Each write of a worker lets others run."""

    host, port = "127.0.0.1", 1

    def __init__(self, world: World):
        self.world, self.values, self.down = world, dict[str, bytes](), False

    def set(self, key: str, value: str) -> None:
        self._answer()
        assert not key.startswith("generation/") or key not in self.values, "one list a generation"
        changed = self.values.get(key) != value.encode()
        self.values[key] = value.encode()
        if changed and key.startswith(("ready", "came", "report")):
            self.world.pause()

    def get(self, key: str) -> bytes:
        self._answer()
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return all(key in self.values for key in keys)

    def _answer(self) -> None:
        if self.down:
            raise RuntimeError("no answer")


class Worker(Members):
    """A worker's process, as subprocess.Popen shows it. Its training follows ElasticAllReduce and Joining."""

    def __init__(self, world: World, name: str):
        self.world, self.name, self.generation, self.names = world, name, 0, []
        self.returncode: int | None = None
        self.stopped = self.was_stopped = self.gone = False
        self.trained: Any = None  # what it has merged, None without a state
        self.life, self.launched, self.phase, self.joining, self.lucky, self.ends = 0, 0, AGREED, False, True, ""
        self.go, self.thread = threading.Semaphore(0), threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            self.returncode, self.gone = -number, True
            self.leave()

    def kill(self) -> None:
        self.send_signal(9)

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

    def leave(self) -> None:
        self.world.closed.add((self.generation, self.name))

    def _train(self) -> None:
        while True:
            reports = self.meet(None, "empty")
            if all(r is None for r in reports) and self.rank == 0:
                self.trained, self.life = (), self.generation  # after all were lost, the run begins again
                self._serve(reports)
                break
            try:
                self._await([f"donor/{self.generation}"])
            except RuntimeError:
                self.leave()
                continue
            state = json.loads(self.store.get(f"donor/{self.generation}"))
            self.launched, self.life = state["launched"], state["life"]
            self.trained = tuple(map(tuple, state["trained"]))
            break
        while self.launched < ROUNDS:
            if self.left():
                self._mend("failed")
            while self.joining:
                reports = self._mend("planned")
                known = [r for r in reports if r is not None]
                self.joining = not (self.planned or any(r["launched"] > self.launched for r in known))
                if reports[self.rank] is known[0]:
                    self._serve(reports)
            parts = self._round()
            assert self.launched not in dict(self.trained), "a sum counts once"
            self.trained = (*self.trained, (self.launched, parts))
            assert self.life >= max((life for life, _ in self.world.merged), default=0), "only one run advances"
            first, names = self.world.merged.setdefault((self.life, self.launched), (self.trained, self.names))
            assert first == self.trained, "the outer iterates are equal"
            assert {*names} & {*self.names}, "no two disjoint groups advance"
        self._round()  # no worker ends before all have merged the last round
        self.end()

    def _serve(self, reports: list[Any]) -> None:
        if None in reports:
            state = {"launched": self.launched, "trained": self.trained, "life": self.life}
            self.store.set(f"donor/{self.generation}", json.dumps(state))

    def _mend(self, came: Any) -> list[Any]:
        self.leave()
        return self.meet({"launched": self.launched, "launched_phase": self.phase}, came)

    def _round(self) -> str:
        self.launched += 1
        while True:
            self.phase = SENT
            summed = self._sum("sum", self.rank == 0 and self.wanted())
            self.phase = SENT if summed is None else SUMMED
            if summed is not None and self._sum("token", False) is not None:
                break
            if agreed(self._mend("failed"), "launched", self.launched):
                break
        assert summed is not None, "whoever goes on from a sum has it"
        self.phase, self.joining = AGREED, self.joining or summed[1]
        return summed[0]

    def _sum(self, kind: str, asks: bool) -> tuple[str, bool] | None:
        """The names of all that have sent, and whether one of them asks; None after an error."""
        world, names, generation, since = self.world, self.names, self.generation, self.world.now
        posts = world.posts.setdefault((generation, self.launched, kind), {})
        posts[self.name] = asks
        while True:
            world.pause()
            lost = any((generation, name) in world.closed for name in names)
            if len(posts) == len(names) and (self.lucky or not lost):
                return ",".join(sorted(posts)), any(posts.values())
            if lost or self.left() or world.now - since > TIMEOUT:
                return None


class World:
    """One execution."""

    def __init__(self, workers: int, restarts: int, monkeypatch: pytest.MonkeyPatch):
        self.now, self.back, self.failure = 0.0, threading.Semaphore(0), None
        self.closed: set[tuple[int, str]] = set()  # (generation, name) of whoever has left a generation's group
        self.posts: dict[tuple[int, int, str], dict[str, bool]] = {}
        self.formed: dict[int, set[str]] = {}
        self.merged: dict[tuple[int, int], Any] = {}
        self.workers: list[Worker] = []
        self.listed, self.out = list[list[str]](), set[str]()
        self.store, self.turn = Store(self), 0
        time = SimpleNamespace(sleep=lambda seconds: self.pause(), monotonic=lambda: self.now)
        dist = SimpleNamespace(init_process_group=self.form, group=SimpleNamespace(WORLD=""))
        fakes = {"time": time, "dist": dist, "PrefixStore": lambda prefix, store: store}
        fakes |= {"new_group": lambda *_: "", "set_timeout": lambda *_: None}
        for name, fake in fakes.items():
            monkeypatch.setattr(members_module, name, fake)
        monkeypatch.setattr(launch, "time", time)
        monkeypatch.setattr(launch, "dist", SimpleNamespace(PrefixStore=lambda prefix, store: store))
        monkeypatch.setattr(launch, "_serve", lambda *_, **__: self.store)
        monkeypatch.setattr(launch, "print", lambda *_, **__: None, raising=False)
        self.agent = launch.Agent(lambda env: self.spawn(env["CO2_WORKER"]), workers, restarts)
        for slot in range(workers):
            self.agent._start(slot)

    def spawn(self, name: str) -> Worker:
        assert name not in [worker.name for worker in self.workers], "a name is used once"
        self.workers.append(Worker(self, name))
        return self.workers[-1]

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
        me, since = next(w for w in self.workers if threading.current_thread() is w.thread), self.now
        formed = self.formed.setdefault(me.generation, set())
        formed.add(me.name)
        while len(formed) < len(me.names):
            if any((me.generation, name) in self.closed for name in me.names) or self.now - since > TIMEOUT:
                raise RuntimeError("a worker does not come")
            self.pause()

    def running(self, worker: Worker) -> bool:
        return worker.returncode is None and not worker.stopped

    def happen(self, event: Event) -> None:
        kind, *who = event
        self.turn += kind in ("look", "step", "late")
        if kind == "look" and not self.store.down:
            self.agent.look()
            self._check_lists()
        elif kind == "tick":
            self.now += TIMEOUT + 1
        elif kind == "lost":
            self.store.down = True
        elif kind in ("step", "unlucky"):
            worker = self.workers[who[0]]
            worker.lucky = kind == "step"
            if self.running(worker):
                worker.go.release()
                self.back.acquire()
        elif kind == "die":
            self.workers[who[0]].kill()
        elif kind in ("stop", "cont"):
            worker = self.workers[who[0]]
            worker.stopped, worker.was_stopped = kind == "stop", True
        if self.failure:
            raise self.failure

    def usual(self) -> Event:
        """The event of whose turn it is."""
        turn = self.turn % (len(self.workers) + 1)
        return ("look",) if turn == 0 else ("step", turn - 1)

    def deviations(self) -> list[Event]:
        found: list[Event] = [] if self.store.down else [("late",), ("lost",)]
        for i, worker in enumerate(self.workers):
            if worker.returncode is None:
                found += [("die", i), ("cont" if worker.stopped else "stop", i), ("unlucky", i)]
        return found

    def _check_lists(self) -> None:
        while (key := f"generation/{len(self.listed) + 1}") in self.store.values:
            names, number = json.loads(self.store.values[key])["names"], len(self.listed)
            for name in self.listed[-1] if self.listed else []:
                self.out |= {name} if f"came/{number}/{name}" not in self.store.values else set()
            self.listed.append(names)
            assert not self.out & {*names}, f"{names}: whoever was left out comes back under a new name only"
        assert len(self.listed) == self.agent.coordinator.generation, "generations rise by one"
        assert len(self.store.values) <= 9 + (6 + 2 * 5) * (1 + len(self.listed)), "keys are bounded"

    def key(self) -> Any:
        """All that the execution's future depends on."""
        values = {k: v for k, v in self.store.values.items() if not k.startswith("node/")}
        workers = [
            (w.returncode, w.stopped, w.generation, str(w.names), w.launched, w.phase, w.joining, w.trained, w.where())
            for w in self.workers
        ]
        c = self.agent.coordinator
        state = {k: v for k, v in vars(c).items() if k not in ("store", "_beats")}
        rest = (self.store.down, self.agent.started, sorted(self.closed), self.posts, str(self.formed), self.now)
        return str((sorted(values.items()), workers, sorted(state.items(), key=str), rest))

    def check_end(self) -> None:
        listed = [w for w in self.workers if self.listed and w.name in self.listed[-1] and w.returncode is None]
        if listed and all(w.stopped for w in listed):
            return  # nobody that takes part in the run can find out that the others are stopped
        for worker in self.workers:
            assert not self.running(worker), f"worker {worker.name} waits for ever"
            if not (worker.gone or worker.was_stopped or self.store.down):
                assert worker.ends in ("well", "over"), f"worker {worker.name} lives, and ends with: {worker.ends}"
        finished = self.agent.finished and not self.store.down  # if all workers are stopped, nobody waits
        assert not (finished and self.agent.processes), "the launcher waits for ever"

    def end(self) -> None:
        for worker in self.workers:
            worker.gone = True
            worker.go.release()
            worker.thread.join()


def explore(workers: int, restarts: int, bound: int, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]) -> int:
    """Tries all executions with up to `bound` deviations of these kinds; their number."""
    seen: dict[Any, int] = {}
    todo: list[tuple[list[Event], int]] = [([], bound)]
    executions = 0
    while todo:
        events, left = todo.pop()
        executions += 1
        world, quiet, ticks = World(workers, restarts, monkeypatch), 0, 0
        try:
            for event in events:
                world.happen(event)
            key = world.key()
            while ticks < 4:
                place = hash((key, world.turn % (len(world.workers) + 1)))
                if seen.get(place, -1) < left:
                    seen[place] = left
                    others = [event for event in world.deviations() if event[0] in kinds and left]
                    todo += [([*events, event], left - 1) for event in others]
                elif quiet == 0:
                    break  # it goes on as one before
                event = world.usual() if quiet <= len(world.workers) else ("tick",)
                events = [*events, event]
                world.happen(event)
                before, key = key, world.key()
                ticks = ticks + 1 if event == ("tick",) else 0 if key != before else ticks
                quiet = 0 if key != before else quiet + 1
            else:
                world.check_end()
        except AssertionError as error:
            raise AssertionError(f"{error}, after {[e for e in events if e[0] not in ('look', 'step')]}") from error
        finally:
            world.end()
    return executions


ALL = ("late", "die", "stop", "cont", "unlucky", "lost")


BOUNDS = [(2, 1, 1), *(pytest.param(*bounds, marks=pytest.mark.slow) for bounds in ((3, 1, 1), (3, 0, 1), (2, 1, 2)))]


@pytest.mark.parametrize(("workers", "restarts", "bound"), BOUNDS)
def test_all_schedules(workers: int, restarts: int, bound: int, monkeypatch: pytest.MonkeyPatch):
    assert explore(workers, restarts, bound, monkeypatch, ALL) > 100
