"""The segmentation data sets: what an item is, that it is reproducible, and what a broken file says."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from core import UserError
from segmentation import data
from training.data import data_root

CAMVID = data_root() / "camvid_240x180.npz"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    return tmp_path


def write_ade20k(root: Path, n: int = 3) -> Path:
    """A folder of the published layout with n pairs a split; mask i holds the labels 0, 1 and 150."""
    folder = root / "ade" / "ADEChallengeData2016"
    rng = np.random.default_rng(0)
    for part in ("training", "validation"):
        for kind in ("images", "annotations"):
            (folder / kind / part).mkdir(parents=True)
        for i in range(n):
            image = Image.fromarray(rng.integers(256, size=(64, 80, 3), dtype=np.uint8))
            image.save(folder / "images" / part / f"{i}.jpg")
            mask = np.ones((64, 80), np.uint8)
            mask[:10], mask[10:20] = 0, 150
            Image.fromarray(mask).save(folder / "annotations" / part / f"{i}.png")
    return folder


def test_ade20k_reduces_the_zero_label_and_crops(root: Path) -> None:
    write_ade20k(root)
    train, val = (data.build_dataset("ade20k", split) for split in ("train", "val"))
    assert len(train) == len(val) == 3 and len(train.metainfo["classes"]) == 150
    item = train[0]
    assert item["inputs"].shape[0] == 3 and item["inputs"].dtype == torch.uint8
    assert max(item["inputs"].shape[1:]) <= 512
    label = val[0]["data_samples"].gt_sem_seg.data
    assert label.shape == (1, 64, 80)  # the mask keeps its size, the image is resized to a height of 512
    assert val[0]["inputs"].shape == (3, 512, 640)
    with pytest.raises(UserError, match="test images come without masks"):
        data.build_dataset("ade20k", "test")
    assert (label[0, :10] == 255).all() and (label[0, 10:20] == 149).all() and (label[0, 20:] == 0).all()


@pytest.mark.parametrize(("label", "dtype"), [(151, np.uint8), (254, np.uint8), (256 + 7, np.uint16)])
def test_label_out_of_range_names_the_file_and_does_not_wrap_around(root: Path, label: int, dtype: type) -> None:
    path = write_ade20k(root) / "annotations/training/1.png"
    Image.fromarray(np.full((64, 80), label, dtype)).save(path)
    with pytest.raises(UserError, match=rf"{path}: label {label} is out of range: expected 1 to 150"):
        data.build_dataset("ade20k", "train")[1]


@pytest.mark.parametrize("damage", ["truncated", "empty", "text"])
def test_corrupt_image_names_the_file(root: Path, damage: str) -> None:
    path = write_ade20k(root) / "images/training/2.jpg"
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[: len(whole) // 2], "empty": b"", "text": b"no image"}[damage])
    with pytest.raises(UserError, match=rf"{path}: not a readable image.*repair or remove") as error:
        data.build_dataset("ade20k", "train")[2]
    assert "\n" not in str(error.value)


def test_missing_and_mismatched_masks_name_the_file(root: Path) -> None:
    folder = write_ade20k(root)
    (folder / "annotations/training/0.png").unlink()
    Image.fromarray(np.ones((64, 79), np.uint8)).save(folder / "annotations/training/1.png")
    Image.fromarray(np.ones((64, 80, 3), np.uint8)).save(folder / "annotations/training/2.png")
    train = data.build_dataset("ade20k", "train")
    with pytest.raises(UserError, match=r"0\.png: no such file"):
        train[0]
    with pytest.raises(UserError, match=r"1\.png: a mask of shape \(64, 79\) for an image of \(64, 80\)"):
        train[1]
    with pytest.raises(UserError, match=r"2\.png: a mask of shape \(64, 80, 3\)"):
        train[2]


@pytest.mark.skipif(not CAMVID.exists(), reason="CO2_DATA has no camvid_240x180.npz")
def test_camvid_maps_void_to_ignored() -> None:
    val = data.build_dataset("camvid", "val")
    assert len(val) == 101
    with np.load(CAMVID) as file:
        images, masks = file["x_val"], file["y_val"]
    item = val[5]
    assert torch.equal(item["inputs"], torch.from_numpy(images[5, ..., ::-1].transpose(2, 0, 1).copy()))
    label = item["data_samples"].gt_sem_seg.data[0].numpy()
    assert np.array_equal(label == 255, masks[5] == 11)
    assert np.array_equal(label[label != 255], masks[5][masks[5] != 11])
    crop = data.build_dataset("camvid", "train")[0]
    assert crop["inputs"].shape == (3, *data.CROP["camvid"])


def test_camvid_errors(root: Path) -> None:
    path = root / "camvid_240x180.npz"
    path.write_bytes(b"PK not really")
    with pytest.raises(UserError, match=rf"{path}: not readable"):
        data.build_dataset("camvid", "train")
    masks = np.zeros((2, 180, 240), np.uint8)
    masks[1, 0, 0] = 12
    np.savez(path, x_train=np.zeros((2, 180, 240, 3), np.uint8), y_train=masks)
    with pytest.raises(UserError, match=r"y_train\[1\]: label 12 is out of range: expected 0 to 10"):
        data.build_dataset("camvid", "train")


def test_digits_masks_are_exact_and_those_of_train_and_val_disjoint():
    """Photographs are shown at half brightness, below 128, and digits in colours above: the image tells the mask."""
    images, masks = data.digits_on_photos("val", 40)
    again, same = data.digits_on_photos("val", 40)
    assert np.array_equal(images, again) and np.array_equal(masks, same)
    assert np.array_equal(images.min(axis=-1) >= 128, masks > 0) and set(np.unique(masks)) == set(range(11))
    assert 0.1 < (masks > 0).mean() < 0.3
    train, val = ({g.tobytes() for g in data._digits(split)[0]} for split in ("train", "val"))
    assert len(train) + len(val) > 1790 and not train & val
    widths = [sum(p.shape[1] for p in data._photos(split)) for split in ("train", "val")]
    assert sum(widths) == 2 * 640
