"""bench.loader: a small run, and its stored rows."""

import json
from pathlib import Path
from statistics import median

from bench import loader

ROWS = json.loads((Path(__file__).parents[2] / "results/loader.json").read_text())["rows"]


def test_both_loaders_load_every_image(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CO2_CACHE", str(tmp_path / "cache"))
    (tmp_path / "images").mkdir()
    bench = loader.Bench(images=3, passes=2)
    loader.write_images(tmp_path / "images", bench.images)
    for load in (loader.ours, loader.torchvisions):
        (batch,) = load(tmp_path / "images", bench)
        assert batch[0].shape == (6, 3, 224, 224) and loader.timed(load, tmp_path / "images", bench)["cpu_seconds"] > 0


def test_the_measured_loader_keeps_up_with_torchvisions():
    ours, plain = (
        [r["images_per_cpu_second"] for r in ROWS if r["loader"] == name] for name in ("ours", "torchvision")
    )
    assert len(ours) == len(plain) >= 3 and median(ours) >= 0.95 * median(plain)
