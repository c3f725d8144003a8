"""The segmentation data sets, batches and pictures, what a broken file says, and metrics."""

import contextlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from PIL import Image

from core import UserError
from segmentation import data
from segmentation.data import Scenes, pack, unpack
from segmentation.metrics import areas_of, metrics_of, side_by_side
from segmentation.recipes import RECIPES, digits_small
from segmentation.train import make_model
from tests.domains.test_segmentation_model import OWN
from tests.scripts import refused
from training.data.files import data_root
from training.optim import make_optimizer
from training.weights.export import write

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


@pytest.mark.parametrize(("label", "dtype"), [(151, np.uint8), (254, np.uint8), (256, np.uint16), (256 + 7, np.uint16)])
def test_label_out_of_range_names_the_file_and_does_not_wrap_around(root: Path, label: int, dtype: type) -> None:
    path = write_ade20k(root) / "annotations/training/1.png"
    Image.fromarray(np.full((64, 80), label, dtype)).save(path)
    with pytest.raises(UserError, match=rf"{path}: label {label} is out of range: expected 1 to 150"):
        data.build_dataset("ade20k", "train")[1]


@pytest.mark.parametrize("order", ["the data set's", "a tool's", "another's"])
def test_a_palette_that_gives_the_classes_colors_to_other_labels_is_refused(root: Path, order: str) -> None:
    path = write_ade20k(root) / "annotations/training/1.png"
    image, colors = Image.fromarray(np.full((64, 80), 2, np.uint8)), [[0, 0, 0], *data.ADE20K.METAINFO["palette"]]
    if order == "a tool's":
        colors[1], colors[2] = colors[2], colors[1]
    image.putpalette([channel for color in colors for channel in color] if order != "another's" else list(range(96)))
    image.save(path)
    expected = pytest.raises(UserError, match=rf"{path}: label 2 has the color of label 1 in its palette: save each")
    with expected if order == "a tool's" else contextlib.nullcontext():
        assert set(data.build_dataset("ade20k", "train")[1]["data_samples"].gt_sem_seg.data.flatten().tolist()) == {1}


def test_missing_and_mismatched_masks_and_no_image_name_the_file(root: Path) -> None:
    folder = write_ade20k(root)
    (folder / "images/training/2.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"2\.jpg: not a readable image"):
        data.build_dataset("ade20k", "train")[2]
    Image.new("RGB", (80, 64)).save(folder / "images/training/2.jpg")
    (folder / "annotations/training/0.png").unlink()
    Image.fromarray(np.ones((64, 79), np.uint8)).save(folder / "annotations/training/1.png")
    Image.fromarray(np.ones((64, 80, 3), np.uint8)).save(folder / "annotations/training/2.png")
    train = data.build_dataset("ade20k", "train")
    with pytest.raises(UserError, match=r"0\.png: not a readable mask \(No such file"):
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


# -- batches, pictures, recipes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> data.ArraySegDataset:
    return data.build_dataset("digits", "train")


def images(dataset: data.ArraySegDataset, rank: int, start: int, total: int, workers: int = 0) -> list[torch.Tensor]:
    """This worker's batches, uint8 [b, 3, h, w] each, of 8 images over two workers."""
    dataset.full_init()
    recipe = replace(digits_small(), batch_size=8, loader_workers=workers)
    return [torch.stack(b["inputs"]) for b in Scenes(dataset).train_batches(recipe, rank, 2, start, total)]


def test_batches_do_not_depend_on_resuming_or_loader_processes(digits: data.ArraySegDataset) -> None:
    few = digits.get_subset(20)  # two batches an epoch
    whole = images(few, 0, 0, 5)
    assert [len(b) for b in whole] == [4] * 5
    for same in (images(few, 0, 1, 5), images(few, 0, 1, 5, workers=2)):
        assert all(torch.equal(a, b) for a, b in zip(whole[1:], same, strict=True))
    assert not torch.equal(whole[0], whole[2])  # the next epoch is shuffled and augmented anew
    assert not torch.equal(whole[0], images(few, 1, 0, 1)[0])


def test_labels_cross_as_bytes_and_arrive_as_mmseg_has_them(digits: data.ArraySegDataset) -> None:
    items = [digits[i] for i in (1, 2)]
    wanted = [item["data_samples"].gt_sem_seg.data.clone() for item in items]
    batch = pack(items)
    assert [label.dtype for label in batch["labels"]] == [torch.uint8] * 2 and batch["inputs"][0].dtype == torch.uint8
    assert not any("gt_sem_seg" in sample for sample in batch["data_samples"])
    arrived = [sample.gt_sem_seg.data for sample in unpack(batch, torch.device("cpu"))["data_samples"]]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(arrived, wanted, strict=True))
    assert wanted[0].dtype == torch.int64 and wanted[0].max() > 0


def test_augmentation_depends_on_seed_epoch_and_index_alone(digits: data.ArraySegDataset) -> None:
    augmented = Scenes(digits)
    first = augmented[3, 0, 7]["inputs"]
    np.random.seed(11)
    before = np.random.get_state()[1].copy()  # type: ignore[index]
    assert torch.equal(augmented[3, 0, 7]["inputs"], first)
    assert np.array_equal(np.random.get_state()[1], before)  # type: ignore[index]
    assert not torch.equal(augmented[3, 1, 7]["inputs"], first)
    assert not torch.equal(augmented[4, 0, 7]["inputs"], first)


def test_pictures_show_colours_black_where_ignored_and_a_legend() -> None:
    image = torch.zeros(3, 4, 6, dtype=torch.uint8)
    image[0] = 200  # blue, in BGR
    label = torch.tensor([[0, 1, 255], [0, 0, 0]])
    prediction = torch.tensor([[1, 1, 1], [0, 0, 0]])
    palette = [[10, 20, 30], [40, 50, 60], [70, 80, 90]]
    figure = side_by_side(image, label, prediction, ["road", "tree", "sky"], palette)
    shown, true, seen = (axes.images[0].get_array() for axes in figure.axes)
    assert shown.shape == (2, 3, 3) and shown[0, 0].tolist() == [0, 0, 200]
    assert true[0].tolist() == [[10, 20, 30], [40, 50, 60], [0, 0, 0]]
    assert seen[0].tolist() == [[40, 50, 60], [40, 50, 60], [0, 0, 0]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["road", "tree"]  # no sky is seen


@pytest.mark.parametrize("name", OWN)
def test_weight_decay_is_that_of_mmsegs_own_config(name: str) -> None:
    recipe, theirs = RECIPES[f"ade20k_{name}"], Config.fromfile(OWN[name]).optim_wrapper
    with torch.device("meta"):
        model = make_model(recipe)
    optimizers = build_optim_wrapper(model, theirs).optimizer, make_optimizer(model, recipe.optim)
    spared, ours = ({p for g in o.param_groups if not g["weight_decay"] for p in g["params"]} for o in optimizers)
    assert ours == spared and recipe.optim.weight_decay == theirs.optimizer.weight_decay
    if name != "resnet50":
        named = dict(model.named_parameters())
        assert {p for key, p in named.items() if "pos_embed" in key or "position_bias" in key} <= spared != set()


# -- mIoU, mAcc and aAcc by hand, and beside mmseg's own --------------------------------------------------------------


CLASSES = ("a", "b", "c", "absent")


def _maps(n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions and labels int64 [n, 20, 30] in three classes; about half of the pixels agree, some are ignored."""
    g = torch.Generator().manual_seed(0)
    label = torch.randint(0, 3, (n, 20, 30), generator=g)
    other = torch.randint(0, 3, label.shape, generator=g)
    prediction = torch.where(torch.rand(label.shape, generator=g) < 0.4, label, other)
    label[torch.rand(label.shape, generator=g) < 0.1] = 255
    return prediction, label


def test_agrees_with_mmsegs_own_evaluation() -> None:
    from mmseg.evaluation import IoUMetric

    prediction, label = _maps()
    theirs, areas = IoUMetric(), torch.zeros(4, len(CLASSES), dtype=torch.float64)
    theirs.dataset_meta = {"classes": CLASSES}
    for p, y in zip(prediction, label, strict=True):
        theirs.process({}, [{"pred_sem_seg": {"data": p[None]}, "gt_sem_seg": {"data": y[None]}}])
        areas += areas_of(p, y, len(CLASSES))
    expected, result = theirs.evaluate(len(label)), metrics_of(areas, CLASSES)
    assert not any(math.isnan(v) for v in result.values())
    for key in ("mIoU", "mAcc", "aAcc"):
        assert result[key] == pytest.approx(float(expected[key]), abs=0.006)  # mmseg rounds to two digits


def test_an_export_needs_no_data_and_keeps_a_users_file(root: Path):
    from segmentation.export import TASK

    (root / "mine.py").write_text("users")
    with refused(f"{root / 'mine.py'} is already there: give mine.pth another name"):
        write(TASK, RECIPES["ade20k_resnet50"], torch.nn.Linear(2, 2), root / "mine.pth")
    assert [(path.name, path.read_text()) for path in root.iterdir()] == [("mine.py", "users")]
    write(TASK, RECIPES["ade20k_resnet50"], torch.nn.Linear(2, 2), root / "its.pth")
    assert sorted(path.name for path in root.iterdir()) == ["its.pth", "its.py", "mine.py"]
    meta = torch.load(root / "its.pth")["meta"]["dataset_meta"]
    assert len(meta["classes"]) == len(meta["palette"]) == 150 and meta["reduce_zero_label"]
