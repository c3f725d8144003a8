"""Reads pictures and label masks of every mode that Pillow supports, without clipping or stretching their values."""

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from core.errors import UserError

BITS_PER_SAMPLE = 258  # TIFF's tag
STRETCHED = {"L;2": 85, "L;4": 17}  # Pillow multiplies grays of few bits by this, to fill a byte


def read_rgb(file: str | Path | IO[bytes], name: str, *, upright: bool = False) -> Image.Image:
    """Reads a picture as RGB. 16-bit grays keep their upper 8 bits, as with cv2 and Pillow's 16-bit colors.

    Errors call the picture `name`. `upright` turns it as its EXIF orientation says.

    Raises:
        UserError: If the mode has no known range of values. Pillow's own errors pass through.
    """
    with Image.open(file) as image:
        image.load()
        turned = ImageOps.exif_transpose(image) if upright else image
        return _eight_bits(turned, image, name).convert("RGB")


def _eight_bits(turned: Image.Image, image: Image.Image, name: str) -> Image.Image:
    """Converts 16-bit grays to 8 bits. `image` is the picture as opened, with its format and tags."""
    if turned.mode.startswith("I;16") or (turned.mode == "I" and image.format in ("PPM", "PNG")):
        tags = getattr(image, "tag_v2", {})
        bits = int(np.max(tags.get(BITS_PER_SAMPLE, 16)))  # 12-bit TIFF also has mode I;16
        return Image.fromarray((np.asarray(turned).astype(np.int64) >> (bits - 8)).clip(0, 255).astype(np.uint8))
    if turned.mode in ("I", "F"):
        kind = "floats" if turned.mode == "F" else "32-bit integers"
        raise UserError(f"{name}: pixels are {kind}, whose range is not known: save it with 8 or 16 bits a channel")
    return turned


def read_mask(path: str | Path, colors: Sequence[Sequence[int]] = (), first: int = 0) -> NDArray[Any]:
    """Reads a label mask as stored, integer [h, w], palette indices included, without applying an EXIF orientation.

    `colors` are the classes' colors in RGB, as mmseg's data sets name them, from label `first` on.

    Raises:
        UserError: If labels are floats, or a JPEG's, or the mask's palette gives the classes' colors to other labels.
            Pillow's own errors pass through.
    """
    with Image.open(path) as image:
        raw = image.tile[0][3] if image.tile else ""
        raw = raw[0] if isinstance(raw, tuple) else raw
        image.load()
        if image.mode == "F" or image.format == "JPEG":
            kind = "floats" if image.mode == "F" else "a JPEG, which changes labels"
            raise UserError(f"{path}: a mask of {kind}: save its labels as whole numbers in a PNG")
        mask = np.asarray(image).astype(np.int64) // STRETCHED.get(raw, 1)
        if colors and image.mode == "P":
            check_palette(mask, np.reshape(image.getpalette("RGB"), (-1, 3)), colors, first, path)
        return mask


def check_palette(
    mask: NDArray[Any], palette: NDArray[Any], colors: Sequence[Sequence[int]], first: int, path: str | Path
) -> None:
    """Refuses a mask whose labels have only colors of classes, but of other ones, as when a tool makes a palette."""
    used = [int(i) for i in np.unique(mask) if first <= i < min(len(palette), 255)]
    meant = {i: [k for k, color in enumerate(colors, first) if list(color) == palette[i].tolist()] for i in used}
    if all(meant.values()) and (wrong := [i for i in used if i not in meant[i]]):
        raise UserError(
            f"{path}: label {wrong[0]} has the color of label {meant[wrong[0]][0]} in its palette: save each pixel's "
            "label by its color, image.convert('RGB'), in a PNG without a palette"
        )
