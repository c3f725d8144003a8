"""The embedded data set: scikit-learn's digits pasted, with exact masks, onto its sample photographs."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits, load_sample_images

Bytes = NDArray[np.uint8]

CLASSES = ("background", *(f"digit {d}" for d in range(10)))
TRAIN_SHARE = 0.8  # of the digits, and of each photograph's width: training and validation share no pixel
THRESHOLD = 0.3  # of full ink, above which a pixel belongs to a digit
OVERLAP = 0.1  # a digit is left out where more than this share of its pixels would cover others


def digits_on_photos(split: str, n: int, size: int = 48, seed: int = 0) -> tuple[Bytes, Bytes]:
    """n scenes of 1 to 4 digits each on a crop of a photograph, the same for equal arguments. split: "train" or "val";
    their digits are different samples and their crops different parts of the photographs. Returns images uint8 [n,
    size, size, 3] RGB and masks uint8 [n, size, size]: 0 background, d + 1 for digit d."""
    rng = np.random.default_rng([seed, split == "train"])
    glyphs, labels = _digits(split)
    photos = _photos(split)
    images = np.empty((n, size, size, 3), np.uint8)
    masks = np.zeros((n, size, size), np.uint8)
    for image, mask in zip(images, masks, strict=True):
        image[:] = _crop(photos[rng.integers(len(photos))], size, rng)
        for i in rng.integers(len(glyphs), size=rng.integers(2, 5)):
            _paste(image, mask, glyphs[i], int(labels[i]) + 1, rng)
    return images, masks


def _digits(split: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Glyphs float64 [m, 8, 8] in [0, 1] and their labels int64 [m]."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    cut = round(TRAIN_SHARE * len(order))
    mine = order[:cut] if split == "train" else order[cut:]
    return digits.images[mine] / 16, digits.target[mine]


def _photos(split: str) -> list[Bytes]:
    """This split's part of each photograph, uint8 [427, w, 3] RGB."""
    photos = load_sample_images().images
    cut = round(TRAIN_SHARE * photos[0].shape[1])
    return [p[:, :cut] if split == "train" else p[:, cut:] for p in photos]


def _crop(photo: Bytes, size: int, rng: np.random.Generator) -> Bytes:
    """A random part of the photograph at half its brightness, so that every digit stands out."""
    top = rng.integers(photo.shape[0] - size + 1)
    left = rng.integers(photo.shape[1] - size + 1)
    return photo[top : top + size, left : left + size] // 2


def _paste(image: Bytes, mask: Bytes, glyph: NDArray[np.float64], label: int, rng: np.random.Generator) -> None:
    """Draws one digit in a colour of its own, in place, unless others lie where it would go."""
    size = image.shape[0]
    side = int(rng.integers(size // 2, 2 * size // 3 + 1))
    ink = cv2.resize(glyph, (side, side), interpolation=cv2.INTER_CUBIC) > THRESHOLD
    top, left = rng.integers(size - side + 1, size=2)
    labels = mask[top : top + side, left : left + side]
    if np.count_nonzero(labels[ink]) > OVERLAP * np.count_nonzero(ink):
        return
    under = image[top : top + side, left : left + side]
    colour = rng.integers(144, 244, size=3)
    noise = rng.integers(-12, 13, size=(side, side, 1))
    under[ink] = np.clip(colour + noise, 0, 255).astype(np.uint8)[ink]
    labels[ink] = label
