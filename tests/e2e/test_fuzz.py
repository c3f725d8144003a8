"""500 hostile command lines, seeded: each is a legal run, or ends in one clear line; nothing impossible is accepted."""

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import pytest

from tests.hostile import cases
from tests.hostile_files import Case, Files
from tests.zygote import Outcome, Zygote

SECONDS = 180.0  # for each; a whole run of the smallest recipe takes five
CASES = 500
MODULES = (
    "vision.train",
    "segmentation.train",
    "pointcloud.train",
    "language.train",
    "language.finetune",
    "language.prepare",
    "training.checks",
    "reproduce",
    "bench.scaling",
    "bench.time_to_loss",
    "bench.loss.__main__",
)


@pytest.fixture(scope="module")
def zygotes() -> Iterator[Queue]:
    with Zygote(MODULES) as one, Zygote(MODULES) as two:
        free: Queue[Zygote] = Queue()
        free.put(one), free.put(two)
        yield free


@pytest.fixture(scope="module")
def files(zygotes: Queue, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Whole data sets and a finished run, which the cases damage copies of."""
    files = Files(tmp_path_factory.mktemp("fuzz"))
    files.make()
    for name in files.runs:
        module, options = files.on_data[name]
        case = Case(name, module, [*options, f"--out=@/{name}"], env=files.env)
        ended = run(zygotes, case.at(files.folder), files.folder)
        assert ended.status == 0, ended.err
    return files


def run(zygotes: Queue, case: Case, folder: Path) -> Outcome:
    zygote = zygotes.get()
    try:
        limits = {"seconds": SECONDS, "file_limit": case.file_limit}
        return zygote.run(case.module, case.arguments, env=case.env, folder=folder, **limits)
    finally:
        zygotes.put(zygote)


def complaint(case: Case, ended: Outcome) -> str:
    """What is wrong with the way in which a case has ended, or nothing."""
    lines = [line for line in (ended.err or ended.out).splitlines() if line.strip()]
    if ended.hung:
        return f"hung for {ended.seconds:.0f} s"
    if "Traceback (most recent call last)" in ended.err or ended.status < 0:
        return f"status {ended.status}: {lines[-1] if lines else 'no word'}"
    if ended.status == 0:
        return "accepted" if case.impossible else ""
    if ended.status != 2:
        return f"status {ended.status}, not 2"
    said = [line for line in lines if line.startswith("error: ")]
    if any(line.startswith("╭") for line in lines):  # tyro's box, of several lines
        return ""
    if len(said) != 1 or lines[-1] != said[0] or not 20 < len(said[0]) < 700:
        return f"no clear last line: {lines[-1][:300] if lines else 'no word'}"
    return ""


@pytest.mark.slow
def test_every_hostile_command_line_runs_or_says_in_a_line_why_not(zygotes: Queue, files: Files, tmp_path: Path):
    chosen = cases(files, random.Random(1), CASES)
    assert len(chosen) == CASES

    def check(number: int, case: Case) -> str:
        folder = tmp_path / str(number)
        folder.mkdir()
        case = case.at(folder)
        found = complaint(case, run(zygotes, case, folder))
        shutil.rmtree(folder, ignore_errors=True)
        return f"{case.name}: {found}\n    {case.module} {case.arguments}" if found else ""

    with ThreadPoolExecutor(2) as pool:
        found = [text for text in pool.map(check, range(CASES), chosen) if text]
    assert not found, f"{len(found)} of {CASES}:\n" + "\n".join(found)
