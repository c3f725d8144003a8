"""Pictures of test images with their labels, for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from training.data.files import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 4


def labelled(images: Tensor, labels: Tensor, predictions: Tensor, classes: Sequence[str]) -> Figure:
    """Draws each image [n, c, h, w] under its true and its predicted label, int64 [n], in red if they differ.

    Images have c 1 (gray) or 3. They are stretched to 0..1 and enlarged.
    """
    from matplotlib.figure import Figure  # imported here, because it is slow

    images = images.float().cpu()
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    shown = ((images - low) / (high - low).clamp(min=1e-6)).permute(0, 2, 3, 1).numpy()
    rows = -(-len(shown) // COLUMNS)
    figure = Figure(figsize=(1.9 * COLUMNS, 2.3 * rows), dpi=100)
    figure.subplots_adjust(0.01, 0.01, 0.99, 1 - 0.2 / rows, 0.05, 0.25)  # a layout engine would be slower than drawing
    for i, (image, true, seen) in enumerate(zip(shown, labels.tolist(), predictions.tolist(), strict=True)):
        axes = figure.add_subplot(rows, COLUMNS, i + 1)
        axes.imshow(image, cmap="gray")
        axes.set_title(
            f"true {printable(classes[true])}\npredicted {printable(classes[seen])}",
            fontsize=9,
            color="C2" if seen == true else "C3",
            parse_math=False,  # a class may be named $1^$
        )
        axes.axis("off")
    return figure
