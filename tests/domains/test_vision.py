"""Vision's models and recipes, batches of images in memory, digits and CIFAR-10, whole and damaged."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from core import UserError
from tests.damages import DAMAGES, write_tar
from tests.scripts import refused
from training.data.files import data_root
from training.data.samples import generator
from training.optim import make_optimizer
from vision import data
from vision.model import build_model, classifier_names
from vision.pictures import labelled
from vision.recipes import RECIPES, digits_small
from vision.train import make_model


@pytest.mark.parametrize("name", ["imagenet_vit_base", "imagenet_swin_tiny", "imagenet_resnet50", "digits_vit"])
def test_weight_decay_is_timms(name: str):
    from timm.optim import param_groups_weight_decay

    with torch.device("meta"):
        model = make_model(RECIPES[name])
        spared = getattr(model, "no_weight_decay", set)()
        theirs = param_groups_weight_decay(model, 0.05, no_weight_decay_list=spared)
    ours = make_optimizer(model, replace(RECIPES[name].optim, weight_decay=0.05)).param_groups
    decayed = {g["weight_decay"]: {id(p) for p in g["params"]} for g in ours}
    assert decayed == {g["weight_decay"]: {id(p) for p in g["params"]} for g in theirs}
    tables = [p for n, p in model.named_parameters() if "pos_embed" in n or "cls_token" in n or "position_bias" in n]
    assert (len(tables) > 0) == ("vit" in name or "swin" in name) and all(id(p) in decayed[0.0] for p in tables)


def batches(start: int, rank: int = 0, *, augment: bool = True) -> list[torch.Tensor]:
    train, _ = data.digits()
    recipe = digits_small().__class__(augment=augment, batch_size=64)
    return [images for images, _ in train.train_batches(recipe, rank, 2, start, 25)]


def test_batches_do_not_depend_on_where_a_run_resumed():
    whole, tail = batches(0), batches(20)
    assert all(torch.equal(a, b) for a, b in zip(whole[20:], tail, strict=True)) and whole[0].shape == (32, 1, 8, 8)
    assert not torch.equal(whole[0], whole[22]), "the next epoch is shuffled anew"
    assert not torch.equal(whole[0], batches(0, rank=1)[0])
    assert not torch.equal(whole[0], batches(0, augment=False)[0])


def test_test_batches_cover_the_test_set_once():
    _, test = data.digits()
    labels = [y for rank in range(3) for _, y in test.test_batches(digits_small(), rank, 3, batch_size=50)]
    assert torch.equal(torch.cat(labels).bincount(), test.labels.bincount())


def test_crops_are_shifted_or_flipped_copies():
    image = torch.arange(64.0).view(1, 1, 8, 8).expand(64, 1, 8, 8)
    out = data.crop_and_flip(image, generator(0))
    assert out.shape == image.shape
    offsets = {tuple((out[i, 0, 3, 4] - image[i, 0, 3, 4]).view(1).int().tolist()) for i in range(64)}
    assert len(offsets) > 9, "three rows by three columns, flipped or not"
    assert set(out.unique().tolist()) <= set(range(64))


@pytest.mark.parametrize(
    ("name", "millions", "size"),
    [("resnet50", 25.557, 64), ("vit_base_patch16_224", 86.568, 224)],  # as published for ImageNet
)
def test_imagenet_models_have_their_published_size(name: str, millions: float, size: int):
    with torch.device("meta"):
        model = build_model(name, num_classes=1000)
        assert model(torch.empty(2, 3, size, size)).shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=5e-4)


LARGER = [("resnet_small", 3, 32), ("swin_small", 1, 8), ("regnet_small", 1, 8)]
LATER = [pytest.param(*of, marks=pytest.mark.slow) for of in LARGER]


@pytest.mark.parametrize(("name", "channels", "size"), [("vit_small", 1, 8), *LATER])
def test_small_models_train_on_both_sizes(name: str, channels: int, size: int):
    torch.manual_seed(0)
    model = build_model(name, num_classes=10, in_chans=channels, image_size=size)
    images, labels = torch.randn(8, channels, size, size), torch.arange(8)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_an_unknown_model_suggests_near_ones():
    with pytest.raises(UserError, match="'resnet5O' is unknown to timm; did you mean resnet5"):
        build_model("resnet5O", num_classes=10)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "resnet18.bogus"}, "model 'resnet18.bogus': timm cannot build it"),
        ({"model": "vit_tiny_patch16_224"}, "'vit_tiny_patch16_224' does not take the 8 x 8 pixels of digits"),
        ({"model": "vgg11_bn", "dataset": "cifar10", "recompute": True}, "recompute=True: timm's vgg11_bn does not"),
        ({"model": "deepseek_vit_412m_enc"}, "'deepseek_vit_412m_enc' of timm is no classifier"),
        ({"dataset": "imagenet", "auto_augment": "rand-m9-x5"}, "auto_augment='rand-m9-x5'"),
    ],
)
def test_what_timm_does_not_have_is_refused_before_a_run(changes: dict[str, Any], words: str):
    with torch.device("meta"), refused(words):
        make_model(replace(digits_small(), **changes))


def test_every_head_of_a_distilled_model_is_named():
    with torch.device("meta"):
        model = build_model("deit_tiny_distilled_patch16_224", num_classes=10)
    assert classifier_names(model) == ["head", "head_dist"]


def test_pictures_are_large_and_name_both_labels():
    images = torch.rand(6, 1, 8, 8)
    figure = labelled(images, torch.tensor([3, 1, 0, 0, 0, 0]), torch.tensor([5, 1, 0, 0, 0, 0]), tuple("0123456789"))
    titles = [axes.title for axes in figure.axes]
    assert [t.get_text() for t in titles[:2]] == ["true 3\npredicted 5", "true 1\npredicted 1"]
    assert titles[0].get_color() != titles[1].get_color()  # a mistake is seen
    assert figure.axes[0].get_window_extent().height > 100  # pixels, of an image of 8
    labelled(images[:1], torch.tensor([0]), torch.tensor([0]), ("$1^$",)).savefig(io.BytesIO())  # no formula


# -- digits and CIFAR-10; CIFAR-10's archive and its cache ------------------------------------------------------------


def test_digits_are_split_without_overlap():
    train, test = data.digits()
    assert (len(train), len(test)) == (1437, 360)
    assert train.images.shape[1:] == (1, 8, 8) and train.images.dtype == torch.uint8 and train.images.max() == 255
    assert set(test.labels.tolist()) == set(range(10))
    pixels = train.normalise(train.images)
    assert abs(pixels.mean()) < 1e-3 and abs(pixels.std() - 1) < 1e-3


def jpeg(colour: int, size: int = 32) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (colour, 0, 255 - colour)).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small archive in CIFAR-10's layout, and a cache folder of its own."""
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    monkeypatch.setenv("CO2_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "cifar10_jpeg.tar.xz"
    write(path, {"train/b/0.jpg": jpeg(200), "train/a/0.jpg": jpeg(20), "test/b/0.jpg": jpeg(90)})
    return path


def write(path: Path, files: dict[str, bytes]) -> None:
    write_tar(path, {f"cifar10/{name}": content for name, content in files.items()}, "w:xz")


def test_cifar_is_decoded_once_with_labels_from_folders(archive: Path):
    train, test = data.cifar10()
    assert train.classes == ("a", "b") and train.labels.tolist() == [0, 1] and test.labels.tolist() == [1]
    assert abs(int(train.images[0, 0, 5, 5]) - 20) < 6 and abs(int(train.images[1, 0, 5, 5]) - 200) < 6
    (cache,) = archive.parent.glob("cache/*/*.npz")
    written = cache.stat().st_mtime_ns
    data.cifar10()
    assert cache.stat().st_mtime_ns == written


ONE_OF_EACH = {"train/a/0.jpg": jpeg(20), "test/a/0.jpg": jpeg(90)}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "holds no image train/CLASS/FILE"),
        ({"notes.txt": b"", "train/x.jpg": jpeg(1), "valid/a/0.jpg": jpeg(1)}, "holds no image train/CLASS/FILE"),
        ({"train/a/0.jpg": jpeg(1)}, "holds no image test/CLASS/FILE"),
        ({**ONE_OF_EACH, "test/b/0.jpg": jpeg(1)}, "test has the class b, which train has not"),
        ({**ONE_OF_EACH, "train/a/1.jpg": jpeg(1, 33)}, "train/a/1.jpg has 33 x 33 pixels, not 32 x 32"),
        ({**ONE_OF_EACH, "train/a/1.jpg": jpeg(1)[:200]}, "train/a/1.jpg is not a readable image"),
        ({**ONE_OF_EACH, "train/a/1.jpg": bytes(3_000_000)}, "train/a/1.jpg is not a readable image"),
    ],
)
def test_an_archive_of_something_else_is_named(archive: Path, files: dict[str, bytes], words: str):
    write(archive, files)
    with pytest.raises(UserError, match=rf"^{archive}: .*{words}.*[;:] fetch it again$"):
        data.cifar10()
    assert not list(archive.parent.glob("cache/[!.]*")), "nothing is left of what failed"


CHANGES = ("npy", "objects", "train_y", "classes")


@pytest.mark.parametrize("change", [*sorted(DAMAGES.keys() - {"missing", "broken link"}), *CHANGES])
def test_a_damaged_cache_is_named(archive: Path, change: str):
    data.cifar10()
    (cache,) = archive.parent.glob("cache/*/*.npz")
    with np.load(cache) as file:
        arrays = dict(file)
    if change in DAMAGES:
        DAMAGES[change](cache)
    elif change == "npy":
        with open(cache, "wb") as to:
            np.save(to, arrays["train_x"])
    elif change in arrays:
        np.savez(cache, **{name: array for name, array in arrays.items() if name != change})
    else:
        np.savez(cache, **arrays | {"train_x": np.array([None, {}], dtype=object)})
    said = rf"^{cache} cannot be read .*: remove {cache.parent}, it is made again$"
    with pytest.raises(UserError, match=said):
        data.cifar10()


@pytest.mark.slow  # where the cache has it not yet
@pytest.mark.skipif(not (data_root() / "cifar10_jpeg.tar.xz").is_file(), reason=f"no CIFAR-10 in {data_root()}")
def test_real_cifar_has_its_published_shape():
    train, test = data.cifar10()
    assert (len(train), len(test), len(train.classes)) == (50_000, 10_000, 10)
    assert train.images.shape[1:] == (3, 32, 32) and np.array_equal(train.labels.bincount(), [5000] * 10)
