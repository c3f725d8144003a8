"""Pictures of point clouds: inputs beside their reconstructions."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw_clouds(rows: Mapping[str, Sequence[np.ndarray]], labels: Sequence[str], caption: str = "") -> np.ndarray:
    """One row of 3-D scatter plots for each entry of `rows`, one column for each cloud.

    All plots share their limits, so that sizes compare; colour is the height z. rows: what the row shows ("input",
    "reconstruction") -> clouds, float [n, 3] each. labels: one title a column. Returns uint8 [height, width, 3].
    """
    columns = len(labels)
    figure = Figure(figsize=(2.2 * columns + 0.4, 2.2 * len(rows) + 0.4), dpi=100)
    canvas = FigureCanvasAgg(figure)  # not pyplot, which opens windows and keeps every figure
    figure.suptitle(caption, fontsize=9)
    for row, (name, clouds) in enumerate(rows.items()):
        for column, cloud in enumerate(clouds):
            axes = figure.add_subplot(len(rows), columns, row * columns + column + 1, projection="3d")
            axes.scatter(*np.asarray(cloud, dtype=np.float64).T, c=cloud[:, 2], cmap="viridis", vmin=-1, vmax=1, s=2)
            axes.set(xlim=(-0.8, 0.8), ylim=(-0.8, 0.8), zlim=(-0.8, 0.8))
            axes.set_box_aspect((1, 1, 1), zoom=1.15)
            axes.set_axis_off()
            axes.set_title(f"{labels[column]}: {name}" if row == 0 else name, fontsize=8, y=0.99)
    figure.subplots_adjust(0, 0, 1, 0.9, 0, 0.08)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
