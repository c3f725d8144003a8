"""What segmentation.train is made of: batches, pictures, recipes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper

from core import UserError
from segmentation import data
from segmentation.data import CPU, SeededAugmentation, eval_batches, pack, train_batches, unpack
from segmentation.metrics import side_by_side
from segmentation.recipes import RECIPES, digits_small
from segmentation.train import make_model
from tests.domains.test_segmentation_data import write_ade20k
from tests.domains.test_segmentation_model import OWN
from training.optim import make_optimizer


@pytest.fixture(scope="module")
def digits() -> data.ArraySegDataset:
    return data.build_dataset("digits", "train")


def images(dataset: data.ArraySegDataset, rank: int, start: int, total: int, workers: int = 0) -> list[torch.Tensor]:
    """This worker's batches, uint8 [b, 3, h, w] each, of 8 images over two workers."""
    dataset.full_init()
    recipe = replace(digits_small(), batch_size=8, loader_workers=workers)
    return [torch.stack(b["inputs"]) for b in train_batches(dataset, recipe, rank, 2, start, total)]


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
    arrived = [sample.gt_sem_seg.data for sample in unpack(batch, CPU)["data_samples"]]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(arrived, wanted, strict=True))
    assert wanted[0].dtype == torch.int64 and wanted[0].max() > 0


def test_augmentation_depends_on_seed_epoch_and_index_alone(digits: data.ArraySegDataset) -> None:
    augmented = SeededAugmentation(digits)
    first = augmented[3, 0, 7]["inputs"]
    np.random.seed(11)
    before = np.random.get_state()[1].copy()  # type: ignore[index]
    assert torch.equal(augmented[3, 0, 7]["inputs"], first)
    assert np.array_equal(np.random.get_state()[1], before)  # type: ignore[index]
    assert not torch.equal(augmented[3, 1, 7]["inputs"], first)
    assert not torch.equal(augmented[4, 0, 7]["inputs"], first)


def test_evaluation_sees_every_image_once() -> None:
    val = data.build_dataset("digits", "val")
    recipe = digits_small()
    batches = [b["inputs"] for rank in range(3) for b in eval_batches(val, recipe, rank, 3, 5)]
    assert max(len(b) for b in batches) == 5
    seen = [image.numpy().tobytes() for batch in batches for image in batch]
    assert sorted(seen) == sorted(val[i]["inputs"].numpy().tobytes() for i in range(128))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_file_is_one_line_from_any_process(tmp_path, workers: int, monkeypatch):
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    path = write_ade20k(tmp_path) / "images/training/1.jpg"
    path.write_bytes(b"no image")
    recipe = replace(digits_small(), batch_size=3, loader_workers=workers)
    with pytest.raises(UserError) as error:
        list(train_batches(data.build_dataset("ade20k", "train"), recipe, 0, 1, 0, 1))
    assert str(error.value).startswith(f"{path}: not a readable image") and "\n" not in str(error.value)


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
