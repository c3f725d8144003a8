"""ImageNet from class folders and tar shards: batches, their index in the cache, and what is broken."""

import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import training.prepared  # noqa: F401, timm imports torchvision

# isort: split
import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.distributed_sampler import RepeatAugSampler
from torchvision.datasets import ImageFolder

from core import UserError
from tests.damages import forbid, write_tar
from training.data.samples import epoch_batches, mix
from vision import data, index
from vision.data import CPU, STATISTICS, Augmented, on_device, train_transform
from vision.model import image_size
from vision.recipes import VisionRecipe, imagenet_vit_base


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four small images in ImageNet's layout."""
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    monkeypatch.setenv("CO2_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for name in ("train/a/0", "train/a/1", "train/b/0", "train/b/1", "val/a/0", "val/b/0"):
        path = tmp_path / "imagenet" / f"{name}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(path, "JPEG")
    return tmp_path / "imagenet"


def imagenet_batches(**changes: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    recipe = VisionRecipe(dataset="imagenet", batch_size=2, loader_workers=0, color_jitter=0.4)
    train, _ = data.load("imagenet")
    return list(train.train_batches(replace(recipe, **changes), 0, 1, 0, 4))


def test_imagenet_batches_do_not_depend_on_loader_workers(folders: Path):
    before = torch.get_rng_state()
    one = imagenet_batches()
    assert torch.equal(before, torch.get_rng_state()), "the model's own random state is left alone"
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, imagenet_batches(loader_workers=2), strict=True))
    assert one[0][0].shape == (2, 3, 224, 224) and sorted(torch.cat([one[0][1], one[1][1]]).tolist()) == [0, 0, 1, 1]
    assert not torch.equal(one[0][0], imagenet_batches(seed=1)[0][0])
    assert not torch.equal(one[0][0], imagenet_batches(color_jitter=0.0)[0][0])


def test_imagenet_mixup_gives_shares_of_classes(folders: Path):
    images, shares = imagenet_batches(mixup=0.8, label_smoothing=0.1)[0]
    assert shares.shape == (2, 2) and torch.allclose(shares.sum(1), torch.ones(2))
    assert torch.equal(images, imagenet_batches(mixup=0.8, label_smoothing=0.1)[0][0])


def test_imagenet_repeats_images_with_another_augmentation(folders: Path):
    recipe = VisionRecipe(dataset="imagenet", batch_size=4, loader_workers=0, repeats=2)
    train, _ = data.load("imagenet")
    ((images, labels),) = train.train_batches(recipe, 0, 1, 0, 1)
    assert torch.equal(labels[0::2], labels[1::2]) and not torch.equal(images[0], images[1])


@pytest.mark.parametrize(("repeats", "workers", "samples"), [(3, 4, 24), (2, 1, 10), (3, 2, 17)])
def test_repeats_are_dealt_as_timm_deals_them(repeats: int, workers: int, samples: int):
    """From the same order; timm's sampler gives every copy of a sample the same index."""
    for rank in range(workers):
        theirs = RepeatAugSampler(range(samples), workers, rank, num_repeats=repeats)
        theirs.set_epoch(mix(5, 2))
        of = dict(seed=5, epoch=2, rank=rank, world_size=workers, repeats=repeats)
        ours = epoch_batches(samples, workers, **of).flatten()
        assert (ours % samples).tolist() == list(theirs)[: len(ours)]
        assert len(set(ours.tolist())) == len(ours), "each copy has a number of its own"


def test_an_odd_share_is_refused_where_mixup_pairs_images():
    with pytest.raises(UserError, match=r"^batch_size=4080 .* 80 workers: 51 images a worker.*give 4000 or 4160$"):
        replace(imagenet_vit_base(), batch_size=4080).check_share(80)
    with pytest.raises(UserError, match="give 2$"):
        VisionRecipe(dataset="imagenet", batch_size=1, mixup=0.8).check_share(1)
    replace(imagenet_vit_base(), batch_size=4080, mixup=0.0, cutmix=0.0).check_share(80)


def test_images_cross_as_bytes_and_are_normalised_behind(folders: Path):
    """What timm's own transform gives without a prefetcher, from the same random numbers; a batch is mixed after it."""
    from timm.data import create_transform

    recipe = VisionRecipe(dataset="imagenet", batch_size=2, loader_workers=0, color_jitter=0.4)
    train, _ = data.load("imagenet")
    at_once = create_transform(224, is_training=True, color_jitter=0.4, interpolation="bicubic")
    item, label = Augmented(train.samples, train_transform(recipe))[0, 5, 1]
    assert (item.dtype, item.shape, label) == (torch.uint8, (3, 224, 224), 0)
    whole, _ = Augmented(train.samples, at_once)[0, 5, 1]
    behind, _ = on_device(item[None], torch.tensor([label]), CPU, *STATISTICS)
    assert torch.equal(behind[0], whole)


def test_erasing_follows_the_seed_and_spares_the_models_random_numbers(folders: Path):
    before = torch.get_rng_state()
    plain, erased = imagenet_batches(), imagenet_batches(random_erasing=1.0)
    assert torch.equal(before, torch.get_rng_state())
    changed = [float((a != b).float().mean()) for (a, _), (b, _) in zip(plain, erased, strict=True)]
    assert all(0.01 < share < 0.5 for share in changed), "a part of each image"
    again = imagenet_batches(random_erasing=1.0, loader_workers=1)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(erased, again, strict=True))
    assert not torch.equal(erased[0][0], imagenet_batches(random_erasing=1.0, seed=1)[0][0])


@pytest.fixture
def shards(folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The images of `folders`, in tar files as WebDataset has them, the labels not in order."""
    root = folders.parent / "shards" / "imagenet"
    for split, names in (("train", ("a/0", "a/1", "b/0", "b/1")), ("val", ("a/0", "b/0"))):
        for number, name in enumerate(names):
            label = b"7" if name.startswith("a") else b"900"
            picture = (folders / split / f"{name}.JPEG").read_bytes()
            key = name.replace("/", "_")
            members = {f"{key}.cls": label, f"{key}.jpg": picture, f"{key}.json": b"{}"}
            write_tar(root / split / f"shard-{number // 3}-{number % 3}.tar", members)
    monkeypatch.setenv("CO2_DATA", str(root.parent))
    return root


def test_shards_give_what_class_folders_give(folders: Path, shards: Path, monkeypatch: pytest.MonkeyPatch):
    """In the same order and with the same augmentation, for both list the same images in the same order here."""
    train, val = data.load("imagenet")
    assert (train.classes, len(train), len(val)) == (("7", "900"), 4, 2)
    found = imagenet_batches(loader_workers=2)
    monkeypatch.setenv("CO2_DATA", str(folders.parent))
    for (images, labels), (theirs, classes) in zip(found, imagenet_batches(loader_workers=2), strict=True):
        assert torch.equal(images, theirs) and torch.equal(labels, classes)


@pytest.mark.parametrize("name", ["x.cls", "x.jpg", "other.txt"])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_a_link_in_a_shard_is_named(shards: Path, name: str, kind: bytes):
    path = shards / "train" / "linked.tar"
    link = tarfile.TarInfo(name)
    link.type, link.linkname = kind, "/etc/passwd"
    write_tar(path, {"x.jpg": b"", "x.cls": b"7", name: link})
    if name == "other.txt":  # nobody's
        assert len(data.load("imagenet")[0]) == 5
    else:
        with pytest.raises(UserError, match=f"^{path}: .*{name} is a link, .*fetch it again"):
            data.load("imagenet")


@pytest.mark.parametrize(
    "content",
    ["", "x", "a\tb\tc\td\0\0", "other.tar\t0\t10\t1\0\0", "../x.tar\t0\t1\t1\0\0", b"\xff\0\0", "\0\0", "x\0\0y\0"],
)
def test_a_damaged_index_is_named(shards: Path, tmp_path: Path, content: str | bytes):
    data.load("imagenet")
    for path in (tmp_path / "cache").glob("index-*/files"):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    where = rf"{tmp_path}/cache/index-\S*"
    with pytest.raises(UserError, match=f"^{where}: .*remove {where}, it is made again$"):
        data.load("imagenet")


def test_an_image_that_cannot_be_read_is_named(folders: Path):
    (folders / "train" / "a" / "1.JPEG").write_bytes(b"no image")
    for workers in (0, 1):
        with pytest.raises(
            UserError, match=r"^\S*train/a/1.JPEG: not a readable image .*: fetch it again or remove it$"
        ):
            imagenet_batches(loader_workers=workers)


def test_files_are_listed_once_and_again_when_they_change(folders: Path, monkeypatch: pytest.MonkeyPatch):
    plain = [ImageFolder(str(folders / split)).samples for split in ("train", "val")]
    listed: list[str] = []
    really = index.pictures
    monkeypatch.setattr(index, "pictures", lambda *a: listed.append(a[0]) or really(*a))
    assert [part.samples.samples for part in data.load("imagenet")] == plain and len(listed) == 2
    assert [part.samples.samples for part in data.load("imagenet")] == plain and len(listed) == 2
    (folders / "train" / "b" / "1.JPEG").rename(folders / "train" / "b" / "2.JPEG")
    train, _ = data.load("imagenet")
    assert len(listed) == 3 and train.samples.samples[-1] == (str(folders / "train" / "b" / "2.JPEG"), 1)


@pytest.mark.parametrize("name", ["train", "train/a", "train/a/deep"])
def test_a_folder_that_cannot_be_read_is_named(folders: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    (folders / "train" / "a" / "deep").mkdir()
    forbid(folders / name, monkeypatch)
    with pytest.raises(UserError, match=f"^{folders / name} cannot be read .Permission denied.: change its perm"):
        data.load("imagenet")


@pytest.mark.parametrize("packed", ["train", "val"])
def test_a_class_has_one_number_in_folders_sorted_as_text_and_shards_sorted_by_number(folders: Path, packed: str):
    picture = next((folders / "val" / "a").iterdir()).read_bytes()
    for split in ("train", "val"):
        shutil.rmtree(folders / split)
        for name in ("2", "10"):
            if split == packed:
                write_tar(folders / split / f"{name}.tar", {"x.cls": name.encode(), "x.jpg": picture})
            else:
                (folders / split / name).mkdir(parents=True)
                (folders / split / name / "x.jpg").write_bytes(picture)
    train, val = data.load("imagenet")
    assert train.classes == val.classes == (("2", "10") if packed == "train" else ("10", "2"))
    for of in (train, val):
        for i in range(2):  # a shard or folder has the name of its class
            name = train.classes[of.samples.read(i)[1]]
            assert f"/{name}.tar" in of.samples.name(i) or f"/{name}/" in of.samples.name(i)


def test_images_are_as_large_as_the_model_wants_them(folders: Path):
    train, val = data.load("imagenet")
    recipe = VisionRecipe(dataset="imagenet", model="vit_base_patch16_384", loader_workers=0)
    assert next(val.test_batches(recipe, 0, 1))[0].shape == (2, 3, 384, 384)
    assert Augmented(train.samples, train_transform(recipe))[0, 0, 0][0].shape == (3, 384, 384)
    assert [image_size(name) for name in ("resnet50", "swin_tiny_patch4_window7_224", "resnet_small")] == [224] * 3


def test_images_are_squashed_if_timms_weights_need_it(folders: Path, monkeypatch: pytest.MonkeyPatch):
    own = {"input_size": (3, 32, 32), "crop_pct": 1.0, "crop_mode": "squash"}
    monkeypatch.setattr(data, "weights_config", lambda _: SimpleNamespace(to_dict=lambda: own))
    _, val = data.load("imagenet")
    images, labels = next(val.test_batches(VisionRecipe(dataset="imagenet", timm_data=True, loader_workers=0), 0, 1))
    whole = np.asarray(val.samples.read(0)[0].resize((32, 32), Image.Resampling.BICUBIC))
    pixels = torch.from_numpy(whole.transpose(2, 0, 1).copy())[None]
    assert torch.equal(images[:1], on_device(pixels, labels[:1], CPU, *STATISTICS)[0])


def test_imagenet_test_batches_cover_the_set(folders: Path):
    _, val = data.load("imagenet")
    recipe = VisionRecipe(dataset="imagenet", loader_workers=0)
    labels = [y for rank in range(2) for _, y in val.test_batches(recipe, rank, 2)]
    assert sorted(torch.cat(labels).tolist()) == [0, 1]
