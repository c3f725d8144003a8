"""Point-cloud sources, items and analytic surfaces; errors that name the file; the train script in one process."""

import io
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core import UserError
from pointcloud import sources
from pointcloud.data import PointClouds, load_source, normalise
from pointcloud.recipes import RECIPES
from pointcloud.sources import Surfaces
from pointcloud.train import main
from tests.damages import forbid
from tests.runs import logged, summary
from training.data.files import data_root
from training.loop.run import Run

SYNSETS = ("02691156", "03001627")


def random_cloud(seed: int, n: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 3)).astype(np.float32)


@pytest.fixture
def shapenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of PointFlow's release with two models a synset and split."""
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    for i, synset in enumerate(SYNSETS):
        for j, split in enumerate(("train", "val", "test")):
            folder = tmp_path / "ShapeNetCore.v2.PC15k" / synset / split
            folder.mkdir(parents=True)
            for k in range(2):
                np.save(folder / f"model{k}.npy", random_cloud(100 * i + 10 * j + k))
    return tmp_path


@pytest.fixture
def shapenet55(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Point-BERT's release with two training models and one for testing."""
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    folder = tmp_path / "ShapeNet55-34"
    (folder / "ShapeNet-55").mkdir(parents=True)
    (folder / "shapenet_pc").mkdir()
    names = [f"{SYNSETS[i % 2]}-model{i}.npy" for i in range(3)]
    for i, name in enumerate(names):
        np.save(folder / "shapenet_pc" / name, random_cloud(i))
    (folder / "ShapeNet-55" / "train.txt").write_text("\n".join(names[:2]) + "\n")
    (folder / "ShapeNet-55" / "test.txt").write_text(names[2] + "\n")
    return tmp_path


def test_layouts_of_both_shapenet_releases(shapenet: Path, shapenet55: Path):
    source = load_source("shapenet", "train")
    assert [Path(source.name(i)).parts[-3] for i in range(len(source))] == [s for s in SYNSETS for _ in range(2)]
    np.testing.assert_array_equal(source.load(3), random_cloud(101))
    assert len(load_source("shapenet", "test")) == 4
    train, test = (load_source("shapenet55", split) for split in ("train", "test"))
    np.testing.assert_array_equal(train.load(1), random_cloud(1))
    np.testing.assert_array_equal(test.load(0), random_cloud(2))


@pytest.mark.parametrize("name", ["", SYNSETS[1], f"{SYNSETS[1]}/train"])
def test_a_folder_that_cannot_be_read_is_named(shapenet: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    forbid(folder := shapenet / "ShapeNetCore.v2.PC15k" / name, monkeypatch)
    with pytest.raises(UserError, match=f"^{folder} cannot be read .Permission denied.: change its permissions"):
        load_source("shapenet", "train")


def test_modelnet10():
    if not (data_root() / "modelnet10_1024_fp16.npz").exists():
        pytest.skip(f"{data_root()} has no modelnet10_1024_fp16.npz")
    train, test = (load_source("modelnet10", split) for split in ("train", "test"))
    assert (len(train), len(test)) == (3991, 908)
    item = PointClouds(test, 1024)[0, 0, 907]
    assert item.shape == (1024, 3) and item.dtype == torch.float32


def test_surfaces_repeat_and_their_splits_differ():
    train, test = (load_source("surfaces", split) for split in ("train", "test"))
    np.testing.assert_array_equal(train.load(5), load_source("surfaces", "train").load(5))
    assert not np.array_equal(train.load(5), test.load(5))
    assert train.load(0).shape == (2048, 3)


def test_items_are_centred_subsets_in_the_unit_sphere(shapenet: Path):
    source = load_source("shapenet", "train")
    whole = torch.from_numpy(normalise(source.load(0).astype(np.float64)).astype(np.float32))
    assert whole.mean(dim=0).abs().max() < 1e-6 and whole.norm(dim=1).max() == pytest.approx(1)
    item = PointClouds(source, 40)[0, 0, 0]
    where = (item[:, None] == whole[None]).all(dim=2)
    assert where.any(dim=1).all() and where.any(dim=0).sum() == 40  # 40 different points of the cloud


def test_items_depend_on_seed_epoch_and_index_only(shapenet: Path):
    source = load_source("shapenet", "train")
    a, b = PointClouds(source, 16), PointClouds(load_source("shapenet", "train"), 16)
    b[0, 0, 3], b[0, 1, 2]  # what else is read, and when, does not matter
    assert torch.equal(a[0, 1, 2], b[0, 1, 2]) and not torch.equal(a[0, 1, 2], a[0, 2, 2])
    assert not torch.equal(a[0, 1, 2], a[1, 1, 2])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_workers_together_see_every_sample_once(world_size: int, shapenet: Path):
    recipe = replace(RECIPES["surfaces_small"], batch_size=6, points=4)
    clouds = PointClouds(Surfaces(Path(), "train"), 4)
    clouds.source.COUNTS = {"train": 13}
    trained, tested = [], []
    for rank in range(world_size):
        batches = clouds.train_batches(recipe, rank, world_size, start=3, total=6)  # the last step of epoch 1, epoch 2
        trained.append(torch.cat(list(batches)))
        tested += [row for batch in clouds.test_batches(recipe, rank, world_size, 2) for row in batch.tolist()]
    assert sorted(tested) == sorted(clouds[0, 0, i].tolist() for i in range(13))
    steps = torch.cat([part.view(3, 6 // world_size, 4, 3) for part in trained], dim=1)
    everything = [[clouds[0, epoch, i].tolist() for i in range(13)] for epoch in range(3)]
    assert all(row in everything[1] for row in steps[0].tolist())
    second = [everything[2].index(row) for step in steps[1:].tolist() for row in step]
    assert len(set(second)) == 12


def test_loader_processes_change_nothing_and_pass_errors_on_as_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Surfaces, "COUNTS", {"train": 64, "test": 9})
    recipe = replace(RECIPES["surfaces_small"], batch_size=8, points=4)
    clouds = PointClouds(load_source("surfaces", "train"), 4)
    recipes = [replace(recipe, loader_workers=n) for n in (0, 1)]
    here, there = ([b.tolist() for b in clouds.train_batches(of, 1, 2, start=6, total=10)] for of in recipes)
    assert here == there and len(here) == 4
    greedy = PointClouds(load_source("surfaces", "train"), 5000)
    for of in recipes:
        with pytest.raises(UserError) as error:
            next(greedy.train_batches(of, 0, 1, start=0, total=1))
        assert str(error.value).startswith("analytic surface ") and "\n" not in str(error.value)
        assert not multiprocessing.active_children(), "they end with the error"


def test_augmentation_stretches_and_moves_within_its_range(shapenet: Path):
    source = load_source("shapenet", "train")
    plain, augmented = (PointClouds(source, 64, augment)[0, 0, 0] for augment in (False, True))
    scale = (augmented.amax(dim=0) - augmented.amin(dim=0)) / (plain.amax(dim=0) - plain.amin(dim=0))
    shift = augmented.mean(dim=0)
    assert (scale > 2 / 3 - 1e-5).all() and (scale < 3 / 2 + 1e-5).all() and scale.std() > 0.01
    assert (shift.abs() <= 0.2).all() and (shift != 0).all()
    torch.testing.assert_close(augmented, plain * scale + shift)


def with_value(value: float) -> np.ndarray:
    cloud = random_cloud(0)
    cloud[7, 1] = value
    return cloud


def archive() -> bytes:
    np.savez(buffer := io.BytesIO(), points=random_cloud(0))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (archive(), "cannot be read .ValueError: the magic string"),
        (b"\x93NUMPY\x01\x00\x06\x00{'a': ", "cannot be read .TokenError"),
        (random_cloud(0, 31), "31 points, but the recipe needs 32"),
        (with_value(np.nan), "1 of 64 points are NaN or infinite"),
        (with_value(np.inf), "1 of 64 points are NaN or infinite"),
        (random_cloud(0).reshape(3, 64), r"expected floating-point \[n, 3\], found float32 \[3, 64\]"),
        (np.zeros((64, 3), dtype=np.int64), r"found int64 \[64, 3\]"),
        (np.ones((64, 3), dtype=np.float32), "all 64 points coincide"),
        (b"no numpy file", "cannot be read"),
        (b"", "cannot be read"),
    ],
    ids=["archive", "header", "too few", "NaN", "inf", "shape", "integers", "one point", "garbage", "empty"],
)
def test_bad_clouds_name_their_file(content: np.ndarray | bytes, problem: str, shapenet: Path):
    path = shapenet / "ShapeNetCore.v2.PC15k" / SYNSETS[0] / "train" / "model1.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(UserError, match=f"model1.npy.*{problem}"):
        PointClouds(load_source("shapenet", "train"), 32)[0, 0, 1]


def test_a_file_listed_but_absent_is_named(shapenet55: Path):
    (shapenet55 / "ShapeNet55-34" / "shapenet_pc" / f"{SYNSETS[0]}-model0.npy").unlink()
    with pytest.raises(UserError, match="model0.npy cannot be read"):
        PointClouds(load_source("shapenet55", "train"), 32)[0, 0, 0]
    (shapenet55 / "ShapeNet55-34" / "ShapeNet-55" / "test.txt").write_text("\n")
    with pytest.raises(UserError, match="test.txt is empty"):
        load_source("shapenet55", "test")


# -- analytic surfaces: every point lies on its surface, and equal areas get equal shares -----------------------------


N = 40_000


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def assert_share(inside: np.ndarray, expected: float) -> None:
    """The share of points in a region equals its share of the area, within four standard errors."""
    assert abs(inside.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / len(inside))


def test_a_torus_has_more_area_outside_and_a_boxs_faces_get_theirs(rng):
    major, minor = 1.0, 0.4
    x = sources.torus(rng, N, major, minor)
    distance = np.hypot(x[:, 0], x[:, 1])
    np.testing.assert_allclose(np.hypot(distance - major, x[:, 2]), minor)
    assert_share(distance > major, 0.5 + minor / (np.pi * major))
    x = sources.box(rng, N, np.array([1.0, 2.0, 4.0]))
    on_face = np.isclose(np.abs(x), [0.5, 1.0, 2.0])
    assert on_face.any(axis=1).all() and (np.abs(x) <= [0.5, 1.0, 2.0]).all()
    for axis, area in enumerate((8, 4, 2)):
        assert_share(on_face[:, axis], area / 14)
    assert_share(x[:, 2] > 1, (1 * 2 + 2 * 1 * 1 + 2 * 2 * 1) / 28)  # a cap, and a quarter of each long side


# -- the train script on a handful of surfaces ------------------------------------------------------------------------


TINY = """
    --epochs 2 --batch_size 8 --points 64 --autoencoder.encoder_widths 16 --autoencoder.latent 16
    --autoencoder.mlp_widths 16 --optim.warmup_steps 0 --co2.tau 2 --log_every 1 --device cpu
    --mae.groups 8 --mae.group_size 8 --mae.dim 24 --mae.depth 1 --mae.heads 2
"""


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs surfaces_small with few, small clouds and no picture; returns (the training losses, the summary)."""
    monkeypatch.setattr(Surfaces, "COUNTS", {"train": 24, "test": 9})
    monkeypatch.setattr("pointcloud.train.save_picture", lambda *_: None)

    def run(*overrides: str, name: str = "run") -> tuple[list[float], dict]:
        out = tmp_path / name
        monkeypatch.setattr(sys, "argv", ["train", "surfaces_small", *TINY.split(), *overrides, "--out", str(out)])
        main()
        return logged(out), summary(out)

    return run


@pytest.mark.parametrize("model", ["autoencoder", "mae"])
def test_a_run_resumed_after_a_crash_ends_as_if_uninterrupted(model: str, train, monkeypatch: pytest.MonkeyPatch):
    whole, end = train("--model", model, name="whole")
    assert len(whole) == 6  # 2 epochs of 24 / 8 steps

    def crash(run: Run, *_: Any) -> bool:
        assert run.step < 5, "crash"
        return False

    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="crash"):
        patch.setattr(Run, "_granted", crash)
        train("--model", model, name="parts")
    resumed, again = train("--model", model, "--resume", name="parts")  # from step 4, within the second epoch
    assert again["steps"] == 6 and resumed[-2:] == whole[-2:] and again["test_chamfer"] == end["test_chamfer"]
