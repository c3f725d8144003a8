"""Data sets for mmseg: ADE20K from its folders, CamVid from one file, and the embedded digits on photographs.

All are registered with mmseg, so a user's own config may name them. An item has the form of mmseg's PackSegInputs:
`inputs` is uint8 [3, h, w] BGR. `data_samples` has the labels in gt_sem_seg, int64 [1, h, w], with 255 for ignored
pixels.
"""

import segmentation.registries  # noqa: F401

# isort: split

from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmengine.dataset import pseudo_collate
from mmengine.structures import PixelData
from mmseg.datasets import ADE20KDataset, BaseSegDataset
from mmseg.registry import DATASETS, TRANSFORMS
from numpy.typing import NDArray
from sklearn.datasets import load_digits, load_sample_images

from core import UserError
from segmentation.recipes import DataName
from training.data.files import data_root, hidden, missing, read_arrays
from training.data.images import read_mask, read_rgb
from training.data.samples import Key, Keyed
from training.start.errors import explained

Bytes = NDArray[np.uint8]

CLASSES = ("background", *(f"digit {d}" for d in range(10)))
SIDE = 48  # pixels of a scene
TRAIN_SHARE = 0.8  # of the digits, and of each photograph's width, so that training and validation share no pixel
THRESHOLD = 0.3  # share of full ink above which a pixel belongs to a digit
OVERLAP = 0.1  # a digit is left out if a larger share of its pixels would cover other digits


def digits_on_photos(split: str, n: int) -> tuple[Bytes, Bytes]:
    """Returns n scenes with 1 to 4 digits each on a crop of a photograph, the same for equal arguments.

    The splits "train" and "val" use different digits and different parts of the photographs.

    Returns:
        Images, uint8 [n, SIDE, SIDE, 3] RGB, and masks, uint8 [n, SIDE, SIDE], with 0 for background and d + 1 for
        digit d.
    """
    rng = np.random.default_rng([0, split == "train"])
    glyphs, labels = _digits(split)
    photos = _photos(split)
    images = np.empty((n, SIDE, SIDE, 3), np.uint8)
    masks = np.zeros((n, SIDE, SIDE), np.uint8)
    for image, mask in zip(images, masks, strict=True):
        image[:] = _crop(photos[rng.integers(len(photos))], rng)
        for i in rng.integers(len(glyphs), size=rng.integers(2, 5)):
            _paste(image, mask, glyphs[i], int(labels[i]) + 1, rng)
    return images, masks


def _digits(split: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns glyphs, float64 [m, 8, 8] in [0, 1], and their labels, int64 [m]."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    cut = round(TRAIN_SHARE * len(order))
    mine = order[:cut] if split == "train" else order[cut:]
    return digits.images[mine] / 16, digits.target[mine]


def _photos(split: str) -> list[Bytes]:
    """Returns this split's part of each photograph, uint8 [427, w, 3] RGB."""
    photos = load_sample_images().images
    cut = round(TRAIN_SHARE * photos[0].shape[1])
    return [p[:, :cut] if split == "train" else p[:, cut:] for p in photos]


def _crop(photo: Bytes, rng: np.random.Generator) -> Bytes:
    """Returns a random part of the photograph at half its brightness, so that every digit stands out."""
    top = rng.integers(photo.shape[0] - SIDE + 1)
    left = rng.integers(photo.shape[1] - SIDE + 1)
    return photo[top : top + SIDE, left : left + SIDE] // 2


def _paste(image: Bytes, mask: Bytes, glyph: NDArray[np.float64], label: int, rng: np.random.Generator) -> None:
    """Draws one digit in its own color, in place, unless it would cover other digits."""
    side = int(rng.integers(SIDE // 2, 2 * SIDE // 3 + 1))
    ink = cv2.resize(glyph, (side, side), interpolation=cv2.INTER_CUBIC) > THRESHOLD
    top, left = rng.integers(SIDE - side + 1, size=2)
    labels = mask[top : top + side, left : left + side]
    if np.count_nonzero(labels[ink]) > OVERLAP * np.count_nonzero(ink):
        return
    under = image[top : top + side, left : left + side]
    colour = rng.integers(144, 244, size=3)
    noise = rng.integers(-12, 13, size=(side, side, 1))
    under[ink] = np.clip(colour + noise, 0, 255).astype(np.uint8)[ink]
    labels[ink] = label


Split = Literal["train", "val", "test"]
IGNORE = 255

CAMVID_CLASSES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
)  # fmt: skip
CAMVID_VOID = 11
CAMVID_PALETTE = [
    [128, 128, 128], [128, 0, 0], [192, 192, 128], [128, 64, 128], [60, 40, 222], [128, 128, 0],
    [192, 128, 128], [64, 64, 128], [64, 0, 128], [64, 64, 0], [0, 128, 192],
]  # fmt: skip


# -- reading files that may be broken ---------------------------------------------------------------------------


WITH_ITS_PAIR = "fetch it again, or remove the image and its mask"


@TRANSFORMS.register_module()
class LoadImage(BaseTransform):
    """Reads results["img_path"] into `img`, uint8 [h, w, 3] BGR. A UserError names the file.

    It replaces mmcv's LoadImageFromFile, which accepts a truncated JPEG. As mmcv's default reader, it turns the image
    as its EXIF orientation says.
    """

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        path = results["img_path"]
        with explained(f"{path}: not a readable image", WITH_ITS_PAIR):
            image = np.asarray(read_rgb(path, path, upright=True))
        results["img"] = np.ascontiguousarray(image[..., ::-1])
        results["img_shape"] = results["ori_shape"] = image.shape[:2]
        return results


@TRANSFORMS.register_module()
class LoadMask(BaseTransform):
    """Reads results["seg_map_path"] into `gt_seg_map`, uint8 [h, w] in [0, num_classes) or 255.

    It replaces mmseg's LoadAnnotations, which wraps 16-bit labels around and does not check the range of labels. As
    LoadAnnotations, it never turns a mask. An image with an EXIF orientation needs a mask of the turned image. With
    results["reduce_zero_label"], label 0 is ignored and all other labels move down by one. A palette must not
    contradict results["colors"]. A UserError names the file.
    """

    def __init__(self, num_classes: int):
        if num_classes > IGNORE:
            raise UserError(f"LoadMask: num_classes={num_classes}: masks of one byte hold at most {IGNORE} classes")
        self.num_classes = num_classes

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        path, shift = results["seg_map_path"], int(results["reduce_zero_label"])
        with explained(f"{path}: not a readable mask", WITH_ITS_PAIR):
            mask = read_mask(path, results.get("colors", ()), shift)
        # An image that is resized for testing keeps the mask's size in ori_shape.
        if mask.shape != tuple(results["ori_shape"]):
            raise UserError(
                f"{path}: a mask of shape {mask.shape} for an image of {tuple(results['ori_shape'])}: one label per "
                "pixel is expected, in a single channel; repair or remove the pair"
            )
        check_labels(mask, self.num_classes, path, shift)
        mask = np.where((mask == IGNORE) | (mask < shift), IGNORE, mask - shift)
        results["gt_seg_map"] = mask.astype(np.uint8)
        results["seg_fields"].append("gt_seg_map")
        return results


def check_labels(mask: NDArray[Any], num_classes: int, where: str | Path, shift: int = 0) -> None:
    """Raises UserError unless every label is in [0, num_classes + shift) or 255. Classes start at `shift`."""
    bad = ((mask >= num_classes + shift) & (mask != IGNORE)) | (mask < 0)
    if bad.any():
        raise UserError(
            f"{where}: label {int(mask[bad][0])} is out of range: expected {shift} to "
            f"{num_classes - 1 + shift}, or {IGNORE} for pixels to ignore"
        )


# -- data sets --------------------------------------------------------------------------------------------------


@DATASETS.register_module()
class ArraySegDataset(BaseSegDataset):
    """Images in memory, for pipelines that begin after loading.

    Args:
        images: uint8 [n, h, w, 3] RGB.
        masks: uint8 [n, h, w], with 255 for pixels to ignore.
        **options: mmengine's options for all data sets, such as pipeline, test_mode and indices.
    """

    def __init__(self, images: Bytes, masks: Bytes, **options: Any):
        self.images, self.masks = images, masks
        # serialize_data packs the list of images, which has only their numbers here
        super().__init__(**options, serialize_data=False)

    def load_data_list(self) -> list[dict[str, Any]]:
        return [{"place": i, "img_path": f"{i}.png", "reduce_zero_label": False} for i in range(len(self.images))]

    def get_data_info(self, idx: int) -> dict[str, Any]:
        info = super().get_data_info(idx)  # mmengine may use a subset, so idx is no place in the arrays
        image, mask = self.images[info["place"]], self.masks[info["place"]]
        return info | {
            "img": np.ascontiguousarray(image[..., ::-1]),
            "img_shape": image.shape[:2],
            "ori_shape": image.shape[:2],
            "gt_seg_map": mask.copy(),
            "seg_fields": ["gt_seg_map"],
        }


@DATASETS.register_module()
class CamVid(ArraySegDataset):
    """CamVid at 240 x 180 in 11 classes (Brostow et al., 2009): 367 training, 101 validation, 233 test images.

    Args:
        root: The folder with camvid_240x180.npz. Its arrays are x_SPLIT, uint8 [n, 180, 240, 3] RGB, and y_SPLIT, uint8
            [n, 180, 240], where 11 is void.
        split: "train", "val" or "test".
        **options: See ArraySegDataset.
    """

    METAINFO = {"classes": CAMVID_CLASSES, "palette": CAMVID_PALETTE}

    def __init__(self, root: str | Path, split: Split, **options: Any):
        path = Path(root, "camvid_240x180.npz")
        if not path.exists():
            raise missing("CamVid", path.parent, f"{path.name} with x_train, y_train, x_val, ...", "digits_small")
        images, masks = read_arrays(path, f"x_{split}", f"y_{split}")
        fits = images.shape == (*masks.shape, 3) and masks.ndim == 3 and masks.size
        if images.dtype != np.uint8 or masks.dtype.kind not in "iu" or not fits:
            found = f"x_{split} {images.dtype} {list(images.shape)}, y_{split} {masks.dtype} {list(masks.shape)}"
            raise UserError(f"{path}: {found}: expected uint8 [n, h, w, 3] and whole numbers [n, h, w]")
        masks = np.where(masks == CAMVID_VOID, IGNORE, masks)
        for i, mask in enumerate(masks):
            check_labels(mask, len(CAMVID_CLASSES), f"{path}, y_{split}[{i}]")
        super().__init__(images, masks, **options)


@DATASETS.register_module()
class DigitsOnPhotos(ArraySegDataset):
    """The embedded data set: 1,024 training and 128 validation scenes of 48 x 48 pixels."""

    METAINFO = {"classes": CLASSES}  # mmseg makes a palette

    def __init__(self, split: Split, **options: Any):
        images, masks = digits_on_photos(split, n=1024 if split == "train" else 128)
        super().__init__(images, masks, **options)


@DATASETS.register_module()
class ADE20K(ADE20KDataset):
    """ADE20K scene parsing (Zhou et al., 2017) in 150 classes: 20,210 training and 2,000 validation images.

    Args:
        root: ADEChallengeData2016 as published, with images/{training,validation}/*.jpg and annotations/*/*.png. Label
            0 is ignored.
        split: "train" or "val".
        **options: mmengine's options for all data sets.
    """

    def __init__(self, root: str | Path, split: Split, **options: Any):
        if split == "test":
            raise UserError("ADE20K's 3,352 test images come without masks: evaluate on the split val")
        part = {"train": "training", "val": "validation"}[split]
        for folder in ("images", "annotations"):
            if not Path(root, folder, part).is_dir():
                expected = f"images/{part}/*.jpg and annotations/{part}/*.png"
                raise missing("ADE20K", Path(root), expected, "digits_small", holds="ade/ADEChallengeData2016")
        prefix = {"img_path": f"images/{part}", "seg_map_path": f"annotations/{part}"}
        super().__init__(data_root=str(root), data_prefix=prefix, **options)
        if not len(self):
            raise UserError(f"no *.jpg in {Path(root, 'images', part)}: unpack ADE20K there again")

    def load_data_list(self) -> list[dict[str, Any]]:
        """Returns mmseg's list without the files of hidden folders, such as .ipynb_checkpoints."""
        images = self.data_prefix["img_path"]
        return [item for item in super().load_data_list() if not hidden(item["img_path"], images)]

    def get_data_info(self, idx: int) -> dict[str, Any]:
        """Returns mmseg's item with the classes' colors, for LoadMask."""
        return super().get_data_info(idx) | {"colors": self.metainfo["palette"]}


# -- the three tasks --------------------------------------------------------------------------------------------

NUM_CLASSES: dict[DataName, int] = {"ade20k": 150, "camvid": 11, "digits": 11}
CROP: dict[DataName, tuple[int, int]] = {"ade20k": (512, 512), "camvid": (144, 144), "digits": (SIDE, SIDE)}
# held-out splits with public labels; the first is evaluated during training, and all at the end
EVAL_SPLITS: dict[DataName, tuple[Split, ...]] = {"ade20k": ("val",), "camvid": ("val", "test"), "digits": ("val",)}
EVAL_BATCH: dict[DataName, int] = {"ade20k": 1, "camvid": 8, "digits": 8}  # ADE20K's images differ in size


def _augmentation(name: DataName) -> list[dict[str, Any]]:
    """Returns mmseg's standard augmentation for ADE20K, smaller scales for CamVid, and no flips for digits."""
    colours = {"type": "PhotoMetricDistortion"}
    if name == "digits":
        return [colours]
    scale, ratios = {"ade20k": ((2048, 512), (0.5, 2.0)), "camvid": ((240, 180), (0.8, 1.6))}[name]
    return [
        {"type": "RandomResize", "scale": scale, "ratio_range": ratios, "keep_ratio": True},
        {"type": "RandomCrop", "crop_size": CROP[name], "cat_max_ratio": 0.75},
        {"type": "RandomFlip", "prob": 0.5},
        colours,
    ]


def build_dataset(name: DataName, split: Split) -> BaseSegDataset:
    """Returns a data set, from CO2_DATA unless it is embedded.

    Items are augmented crops of CROP[name] for "train", and whole images for other splits.

    Raises:
        UserError: If the data set is missing or broken.
    """
    return DATASETS.build(dataset_config(name, split))


def dataset_config(name: DataName, split: Split) -> dict[str, Any]:
    """Returns mmseg's config of a data set."""
    train = split == "train"
    pipeline = _augmentation(name) if train else []
    if name == "ade20k":
        load_mask = {"type": "LoadMask", "num_classes": NUM_CLASSES[name]}
        resize = {"type": "Resize", "scale": (2048, 512), "keep_ratio": True}  # for testing; masks keep their size
        pipeline = [{"type": "LoadImage"}, *([load_mask, *pipeline] if train else [resize, load_mask])]
    kind = {
        "digits": {"type": "DigitsOnPhotos"},
        "camvid": {"type": "CamVid", "root": str(data_root())},
        "ade20k": {"type": "ADE20K", "root": str(data_root() / "ade" / "ADEChallengeData2016")},
    }[name]
    pipeline = [*pipeline, {"type": "PackSegInputs"}]
    return kind | {"split": split, "test_mode": not train, "pipeline": pipeline}


# -- batches ----------------------------------------------------------------------------------------------------------


cv2.setNumThreads(0)  # loading processes run in parallel; each would start a thread for every core

# `inputs`, uint8 [3, h, w] BGR, and `data_samples`, mmseg's SegDataSample, each a list with one entry per image; on the
# way to the device also `labels`, uint8 [1, h, w]
Batch = dict[str, list[Any]]


def pack(items: list[dict[str, Any]]) -> Batch:
    """Makes a batch for the copy to the device, with labels as bytes (an eighth of mmseg's) that torch can pin."""
    batch = pseudo_collate(items)
    batch["labels"] = [sample.gt_sem_seg.data.to(torch.uint8) for sample in batch["data_samples"]]
    for sample in batch["data_samples"]:
        del sample.gt_sem_seg
    return batch


def unpack(batch: Batch, device: torch.device) -> Batch:
    """Copies a batch to the device without waiting, and puts its labels where mmseg expects them, as int64."""
    for sample, label in zip(batch["data_samples"], batch.pop("labels"), strict=True):
        sample.gt_sem_seg = PixelData(data=label.to(device, non_blocking=True).long())
    return batch | {"inputs": [image.to(device, non_blocking=True) for image in batch["inputs"]]}


class Scenes(Keyed):
    """A data set of mmseg whose items have keys. The random transforms' numbers follow from the key.

    mmcv's transforms draw from numpy's global generator, which is restored afterwards.
    """

    collate = staticmethod(pack)

    def __init__(self, dataset: BaseSegDataset):
        self.dataset = dataset
        self.classes, self.palette = (dataset.metainfo[name] for name in ("classes", "palette"))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> dict[str, Any]:
        state = np.random.get_state()
        np.random.seed(key)
        try:
            return self.dataset[key[-1]]
        finally:
            np.random.set_state(state)
