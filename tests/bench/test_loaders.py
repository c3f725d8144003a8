"""bench.loaders: what it counts, and that its ways load the same."""

import time
from pathlib import Path

import pytest
from torch.utils.data import Dataset

from bench import loaders
from bench.loaders import BATCH, FILES, cpu_seconds, keys, table, write_images
from training.sampling import load_batches


class Busy(Dataset[int]):
    """An item takes a tenth of a second of CPU time, or of waiting."""

    def __init__(self, works: bool):
        self.works = works

    def __getitem__(self, _: int) -> int:
        begin = time.process_time()
        while self.works and time.process_time() - begin < 0.1:
            pass
        time.sleep(0.0 if self.works else 0.1)
        return 0


@pytest.mark.parametrize("workers", [0, 1])
def test_cpu_time_is_counted_where_it_is_spent_and_waiting_is_not(workers: int):
    working, waiting = (
        cpu_seconds(load_batches(Busy(works), iter([[0, 1], [2, 3]]), workers)) for works in (True, False)
    )
    loop, loading = working
    assert (loading if workers else loop) >= 0.4 and (loading > loop) == bool(workers)
    assert sum(waiting) < sum(working) - 0.2


def test_keys_cover_the_files():
    batches = list(keys(3))
    assert [len(batch) for batch in batches] == [BATCH] * 3
    assert {i for batch in batches for *_, i in batch} == set(range(FILES))


def test_folders_and_shards_hold_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from vision.imagenet import ImageNet

    monkeypatch.setenv("CO2_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loaders, "FILES", 4)
    write_images(tmp_path / "folders", tmp_path / "shards")
    folders, shards = ImageNet(tmp_path / "folders").samples, ImageNet(tmp_path / "shards").samples
    assert len(folders) == len(shards) == 4
    for i in range(4):
        (image, label), (same, number) = folders.read(i), shards.read(i)
        assert label == number and image.tobytes() == same.tobytes() and image.size == (640, 427)


def test_the_table_shows_medians_and_spreads():
    row = {"what": "clouds", "how": "packed", "unit": "clouds", "a_second": [10.0, 30.0, 20.0], "loop_seconds": [0.002]}
    assert table([row]).splitlines()[-1] == "| clouds | packed | 20 (10 to 30) clouds | 2.0 |"
