"""Vision's data and models."""

import errno
import io
import lzma
import shutil
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from core import UserError
from tests.hostile import DAMAGES
from training.checks import dry_run
from training.optim import make_optimizer
from training.sampling import generator
from vision import data, index
from vision.imagenet import CPU, Augmented, erasing_of, on_device, train_transform
from vision.model import build_model, image_size
from vision.recipes import RECIPES, VisionRecipe, digits_small, imagenet_swin_tiny, imagenet_vit_base
from vision.train import make_model


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
    write(
        tmp_path / "cifar10_jpeg.tar.xz",
        {"train/b/0.jpg": jpeg(200), "train/a/0.jpg": jpeg(20), "test/b/0.jpg": jpeg(90)},
    )
    return tmp_path / "cifar10_jpeg.tar.xz"


def write(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:xz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"cifar10/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_cifar_is_decoded_once_with_labels_from_folders(archive: Path):
    train, test = data.cifar10()
    assert train.classes == ("a", "b") and train.labels.tolist() == [0, 1] and test.labels.tolist() == [1]
    assert abs(int(train.images[0, 0, 5, 5]) - 20) < 6 and abs(int(train.images[1, 0, 5, 5]) - 200) < 6
    (cache,) = (archive.parent / "cache").iterdir()
    written = cache.stat().st_mtime_ns
    data.cifar10()
    assert cache.stat().st_mtime_ns == written


def test_a_corrupt_image_is_named(archive: Path):
    write(archive, {"train/a/bad.jpg": b"no image", "test/a/0.jpg": jpeg(1)})
    with pytest.raises(UserError, match="train/a/bad.jpg is not a readable image"):
        data.cifar10()


def test_a_truncated_archive_is_named(archive: Path):
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(UserError, match="cifar10_jpeg.tar.xz: cannot be read as a tar archive"):
        data.cifar10()


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
    with pytest.raises(UserError, match=rf"^{archive}: .*{words}.*; fetch it again$"):
        data.cifar10()
    assert not list(archive.parent.glob("cache/*")), "nothing is left of what failed"


@pytest.mark.parametrize("damage", ["flip", "garbage", "empty", "text", "no tar"])
def test_a_damaged_archive_is_named(archive: Path, damage: str):
    if damage == "no tar":
        archive.write_bytes(lzma.compress(b"no archive" * 1000))
    else:
        DAMAGES[damage](archive)
    with pytest.raises(UserError, match=f"^{archive}: cannot be read as a tar archive .*; fetch it again$"):
        data.cifar10()


@pytest.mark.parametrize(
    "change",
    [
        *sorted(DAMAGES.keys() - {"missing", "broken link"}),
        "npy",
        "objects",
        "floats",
        "grey",
        "labels",
        "none",
        "train_y",
        "classes",
    ],
)
def test_a_damaged_cache_is_named(archive: Path, change: str):
    data.cifar10()
    (cache,) = archive.parent.glob("cache/*.npz")
    with np.load(cache) as file:
        arrays = dict(file)
    x, y = arrays["train_x"], arrays["train_y"]
    others: dict[str, dict[str, Any]] = {
        "objects": {"train_x": np.array([None, {}], dtype=object)},
        "floats": {"train_x": x.astype(np.float32)},
        "grey": {"test_x": arrays["test_x"][:, :1]},
        "labels": {"train_y": y + 5},
        "none": {"train_x": x[:0], "train_y": y[:0]},
    }
    if change in DAMAGES:
        DAMAGES[change](cache)
    elif change == "npy":
        with open(cache, "wb") as to:
            np.save(to, x)
    elif change in arrays:
        np.savez(cache, **{name: array for name, array in arrays.items() if name != change})
    else:
        np.savez(cache, **arrays | others[change])
    with pytest.raises(UserError, match=rf"^{cache}: .*: remove it, it is made again$"):
        data.cifar10()


def test_a_cache_that_takes_no_more_is_named_and_nothing_is_left(archive: Path, monkeypatch: pytest.MonkeyPatch):
    def full(file: Any, **arrays: Any) -> None:
        Path(file).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(UserError, match="cache cannot be written .No space.*set CO2_CACHE to another folder"):
        data.cifar10()
    assert not list(archive.parent.glob("cache/*"))


def test_missing_cifar_names_folder_layout_and_stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    with pytest.raises(UserError) as caught:
        data.cifar10()
    text = str(caught.value)
    assert str(tmp_path) in text and "split/class/file" in text and "digits_small" in text and "\n" not in text


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


def test_an_odd_share_is_refused_where_mixup_pairs_images(folders: Path):
    with pytest.raises(UserError, match=r"^batch_size=4080 .* 80 workers: 51 images a worker.*give 4000 or 4160$"):
        replace(imagenet_vit_base(), batch_size=4080).check_share(80)
    with pytest.raises(UserError, match="give 2$"):
        imagenet_batches(batch_size=1, mixup=0.8)
    replace(imagenet_vit_base(), batch_size=4080, mixup=0.0, cutmix=0.0).check_share(80)


def test_erasing_is_by_pixels():
    erasing = erasing_of(imagenet_vit_base(), CPU)
    assert (erasing.probability, erasing.per_pixel) == (0.25, True)


def test_images_cross_as_bytes_and_are_normalised_behind(folders: Path):
    """What timm's own transform gives without a prefetcher, from the same random numbers; a batch is mixed after it."""
    from timm.data import create_transform

    recipe = VisionRecipe(dataset="imagenet", batch_size=2, loader_workers=0, color_jitter=0.4)
    train, _ = data.load("imagenet")
    at_once = create_transform(224, is_training=True, color_jitter=0.4, interpolation="bicubic")
    item, label = Augmented(train.samples, train_transform(recipe))[1, 5]
    assert (item.dtype, item.shape, label) == (torch.uint8, (3, 224, 224), 0)
    whole, _ = Augmented(train.samples, at_once)[1, 5]
    behind, _ = on_device(item[None], torch.tensor([label]), recipe, CPU)
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


def write_shard(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def shards(folders: Path) -> Path:
    """The images of `folders`, in tar files as WebDataset has them, the labels not in order."""
    root = folders.parent / "shards" / "imagenet"
    for split, names in (("train", ("a/0", "a/1", "b/0", "b/1")), ("val", ("a/0", "b/0"))):
        for number, name in enumerate(names):
            label = b"7" if name.startswith("a") else b"900"
            picture = (folders / split / f"{name}.JPEG").read_bytes()
            key = name.replace("/", "_")
            members = {f"{key}.cls": label, f"{key}.jpg": picture, f"{key}.json": b"{}"}
            write_shard(root / split / f"shard-{number // 3}-{number % 3}.tar", members)
    return root


def test_shards_give_what_class_folders_give(folders: Path, shards: Path, monkeypatch: pytest.MonkeyPatch):
    """In the same order and with the same augmentation, for both list the same images in the same order here."""
    wanted = imagenet_batches(loader_workers=2)
    monkeypatch.setenv("CO2_DATA", str(shards.parent))
    train, val = data.load("imagenet")
    assert (train.classes, len(train), len(val)) == (("7", "900"), 4, 2)
    for (images, labels), (theirs, classes) in zip(imagenet_batches(loader_workers=2), wanted, strict=True):
        assert torch.equal(images, theirs) and torch.equal(labels, classes)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"x.jpg": b"", "y.cls": b"1"}, "x has no x.cls beside it"),
        ({"x.jpg": b"", "x.cls": b"cat"}, "not a shard of images and classes .*'cat'"),
        ({"x.txt": b""}, "no image in it"),
    ],
)
def test_shards_that_are_none_are_named(
    shards: Path, monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes], words: str
):
    monkeypatch.setenv("CO2_DATA", str(shards.parent))
    write_shard(shards / "train" / "other.tar", members)
    with pytest.raises(UserError, match=rf"^\S*train/other.tar: {words}"):
        data.load("imagenet")
    (shards / "train" / "other.tar").write_bytes(b"no tar at all")
    with pytest.raises(UserError, match=r"^\S*train/other.tar: not a shard"):
        data.load("imagenet")


@pytest.mark.parametrize("name", ["x.cls", "x.jpg", "other.txt"])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_a_link_in_a_shard_is_named(shards: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: bytes):
    monkeypatch.setenv("CO2_DATA", str(shards.parent))
    path = shards / "train" / "linked.tar"
    write_shard(path, {"x.jpg": jpeg(3), "x.cls": b"7"} | {name: b""})
    with tarfile.open(path, "w") as tar:
        for member, content in {"x.jpg": jpeg(3), "x.cls": b"7"}.items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            if member != name:
                tar.addfile(info, io.BytesIO(content))
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    if name == "other.txt":  # nobody's
        assert len(data.load("imagenet")[0]) == 5
    else:
        with pytest.raises(UserError, match=f"^{path}: .*{name} is a link, .*fetch it again"):
            data.load("imagenet")


@pytest.mark.parametrize(
    "content", ["", "x", "a\tb\tc\td\n", "other.tar\t0\t10\t1\n", "../x.tar\t0\t1\t1\n", b"\xff\n"]
)
def test_a_damaged_index_is_named(shards: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | bytes):
    monkeypatch.setenv("CO2_DATA", str(shards.parent))
    monkeypatch.setenv("CO2_CACHE", str(tmp_path / "cache"))
    data.load("imagenet")
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rf"^{tmp_path}/cache/index-\S*: .*remove it, it is made again$"):
        data.load("imagenet")


def test_a_broken_image_in_a_shard_is_named(shards: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CO2_DATA", str(shards.parent))
    write_shard(shards / "train" / "bad.tar", {"x.jpg": b"no image", "x.cls": b"7"})
    with pytest.raises(UserError, match=r"^\S*train/bad.tar, the image at byte 512: not a readable image"):
        imagenet_batches(batch_size=5)


def test_recipes_follow_the_work_that_they_cite():
    """DeiT: repeated augmentation, no clipping; Swin: 20 epochs of warm-up, clipping by 5, jitter 0.4, no repeats."""
    vit, swin = imagenet_vit_base(), imagenet_swin_tiny()
    epoch = 1_281_167 // 4096
    assert (vit.repeats, vit.optim.clip_grad_norm, vit.optim.warmup_steps, vit.color_jitter) == (
        3,
        None,
        5 * epoch,
        0.3,
    )
    assert (swin.repeats, swin.optim.clip_grad_norm, swin.optim.warmup_steps) == (1, 5.0, 20 * epoch)
    assert swin.color_jitter == 0.4
    assert all(r.co2.outer_momentum == 0.6 for r in RECIPES.values() if r.dataset == "imagenet"), "more than 64 GPUs"


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
    assert (len(tables) > 0) == ("vit" in name or "swin" in name)
    assert all(id(p) in decayed[0.0] for p in tables)


def test_imagenet_errors_name_the_file_or_folder(folders: Path, monkeypatch: pytest.MonkeyPatch):
    (folders / "train" / "a" / "1.JPEG").write_bytes(b"no image")
    for workers in (0, 1):
        with pytest.raises(UserError, match=r"^\S*train/a/1.JPEG: not a readable image; .*$"):
            imagenet_batches(loader_workers=workers)
    monkeypatch.setenv("CO2_DATA", str(folders / "train"))
    with pytest.raises(UserError, match="no ImageNet in .*train/imagenet: expected .*digits_small"):
        data.load("imagenet")


def test_files_are_listed_once_and_again_when_they_change(folders: Path, monkeypatch: pytest.MonkeyPatch):
    plain = [index.ImageFolder(str(folders / split)).samples for split in ("train", "val")]
    listed: list[str] = []
    really = index.ImageFolder.make_dataset
    monkeypatch.setattr(index.ImageFolder, "make_dataset", lambda *a: listed.append(a[0]) or really(*a))
    assert [part.samples.samples for part in data.load("imagenet")] == plain and len(listed) == 2
    assert [part.samples.samples for part in data.load("imagenet")] == plain and len(listed) == 2
    (folders / "train" / "b" / "1.JPEG").rename(folders / "train" / "b" / "2.JPEG")
    train, _ = data.load("imagenet")
    assert len(listed) == 3 and train.samples.samples[-1] == (str(folders / "train" / "b" / "2.JPEG"), 1)


def test_other_workers_of_a_node_wait_for_the_first(folders: Path, monkeypatch: pytest.MonkeyPatch):
    (path, first) = index.index_path(folders / "val", ["a", "b"]), data.load("imagenet")[1]
    path.rename(path.with_suffix(".later"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    timer = threading.Timer(0.5, path.with_suffix(".later").rename, [path])
    timer.start()
    _, val = data.load("imagenet")
    assert not timer.is_alive() and val.samples.samples == first.samples.samples
    path.unlink()
    monkeypatch.setattr(index, "PATIENCE", 0.3)
    with pytest.raises(UserError, match="did not come from this node's first worker: set CO2_CACHE"):
        data.load("imagenet")


def test_an_index_that_cannot_be_written_names_the_variable(folders: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CO2_CACHE", str(folders / "train" / "a" / "0.JPEG" / "cache"))
    with pytest.raises(UserError, match="cannot be written .Not a directory.: set CO2_CACHE to another folder"):
        data.load("imagenet")


def test_classes_that_differ_are_named(folders: Path):
    shutil.copytree(folders / "train" / "a", folders / "train" / "c")
    (folders / "val" / "b").rename(folders / "val" / "d")
    with pytest.raises(UserError) as error:
        data.load("imagenet")
    assert str(error.value).endswith("differ in b (only in train), c (only in train), d (only in val)")


def test_images_are_as_large_as_the_model_wants_them(folders: Path):
    images, _ = imagenet_batches(model="vit_base_patch16_384")[0]
    assert images.shape == (2, 3, 384, 384)
    _, val = data.load("imagenet")
    recipe = VisionRecipe(dataset="imagenet", model="vit_base_patch16_384", loader_workers=0)
    assert next(val.test_batches(recipe, 0, 1))[0].shape == (2, 3, 384, 384)
    assert [image_size(name) for name in ("resnet50", "swin_tiny_patch4_window7_224", "resnet_small")] == [224] * 3


@pytest.mark.parametrize("name", ["mixup", "cutmix", "color_jitter", "random_erasing"])
def test_settings_of_imagenet_are_refused_elsewhere(name: str):
    with pytest.raises(UserError, match=f"{name}=0.5 is for imagenet only, not digits: leave it out"):
        replace(digits_small(), **{name: 0.5})


def test_stochastic_depth_where_a_model_has_none():
    with pytest.raises(UserError, match="drop_path=0.1: resnet_small has no stochastic depth"):
        build_model("resnet_small", num_classes=10, drop_path=0.1)
    with pytest.raises(UserError, match="drop_path=0.1: timm's vgg11 has no stochastic depth"):
        build_model("vgg11", num_classes=10, drop_path=0.1)
    with torch.device("meta"):
        assert sum(p.numel() for p in build_model("vgg11", num_classes=10).parameters()) > 100e6


def test_imagenet_test_batches_cover_the_set(folders: Path):
    _, val = data.load("imagenet")
    recipe = VisionRecipe(dataset="imagenet", loader_workers=0)
    labels = [y for rank in range(2) for _, y in val.test_batches(recipe, rank, 2)]
    assert sorted(torch.cat(labels).tolist()) == [0, 1]


def batches(start: int, rank: int = 0, *, augment: bool = True) -> list[torch.Tensor]:
    train, _ = data.digits()
    recipe = digits_small().__class__(augment=augment, batch_size=64)
    return [images for images, _ in train.train_batches(recipe, rank, 2, start, 25)]


def test_batches_do_not_depend_on_where_a_run_resumed():
    whole, tail = batches(0), batches(20)
    assert all(torch.equal(a, b) for a, b in zip(whole[20:], tail, strict=True))
    assert whole[0].shape == (32, 1, 8, 8)
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


@pytest.mark.parametrize("name", ["resnet_small", "vit_small"])
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 32)])
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


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_dry(name: str, capsys: pytest.CaptureFixture):
    recipe = RECIPES[name]
    dry_run(recipe, lambda: make_model(recipe))
    assert f'"model": "{recipe.model}"' in (text := capsys.readouterr().out)
    assert float(text.splitlines()[-1].split()[0]) > 0.1


@pytest.mark.skipif("not __import__('os').environ.get('CO2_DATA')", reason="CO2_DATA is not set: no CIFAR-10")
def test_real_cifar_has_its_published_shape():
    train, test = data.cifar10()
    assert (len(train), len(test), len(train.classes)) == (50_000, 10_000, 10)
    assert train.images.shape[1:] == (3, 32, 32)
    assert np.array_equal(train.labels.bincount(), [5000] * 10)
