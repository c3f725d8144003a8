"""Packs a ShapeNet split's clouds in one file, instead of tens of thousands: `python -m pointcloud.pack shapenet`.

It writes these files to the folder CO2_DATA, next to the release's own folder, for the splits train and test:

    DATASET_SPLIT.npy   the points of all clouds, one after the other, [points, 3], as they are stored; to be mapped
    DATASET_SPLIT.npz   ends int64 [clouds], labels and names [clouds]; written last, so that half a file is not used

From then on the train script reads these, and the workers of a node share one copy in memory. Pack again when the data
changes, because nothing compares the two. The files are not in the cache, because a home folder seldom has room for 9
GB.
"""

import os
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from core import UserError
from core.checkpoint.stored import reason
from pointcloud.sources import SPLITS, Source, unpacked
from training.data import data_root, read_arrays
from training.script import launch


class Packed:
    """The clouds in packed files, see pointcloud.sources.Source."""

    def __init__(self, root: Path, name: str, split: str):
        self.path = packed_path(root, name, split)
        try:
            self.points = np.lib.format.open_memmap(self.path, mode="r")
            self.ends, self.labels, self.names = read_arrays(self.path.with_suffix(".npz"), "ends", "labels", "names")
        except Exception as error:  # damaged headers raise many kinds of errors
            raise UserError(f"{self.path} or its .npz cannot be read ({reason(error)}): {_again(name)}") from None
        if len(self.points) != self.ends[-1]:
            raise UserError(f"{self.path} has {len(self.points)} points, its .npz says {self.ends[-1]}: {_again(name)}")

    def __len__(self) -> int:
        return len(self.ends)

    def load(self, index: int) -> np.ndarray:
        return self.points[self.ends[index - 1] if index else 0 : self.ends[index]]

    def label(self, index: int) -> str:
        return str(self.labels[index])

    def name(self, index: int) -> str:
        return f"{self.path}, {self.names[index]}"


def packed_path(root: Path, name: str, split: str) -> Path:
    return root / f"{name}_{split}.npy"


def pack(source: Source, path: Path) -> None:
    """Writes the clouds of a source to `path` and an .npz next to it. A UserError names a cloud that is not [n, 3]."""
    ends, dtype, end = [], source.load(0).dtype, 0
    for i in range(len(source)):
        cloud = source.load(i)
        if cloud.ndim != 2 or cloud.shape[1] != 3 or cloud.dtype != dtype:
            found = f"{cloud.dtype} {list(cloud.shape)}"
            raise UserError(f"{source.name(i)}: expected {dtype} [n, 3], found {found}: repair or remove it")
        end += len(cloud)
        ends.append(end)
    numbers = range(len(source))
    labels, names = [source.label(i) for i in numbers], [Path(source.name(i)).name for i in numbers]
    part, whole = path.with_suffix(".part"), path.with_suffix(".part.npz")
    header = dict(descr=np.lib.format.dtype_to_descr(dtype), fortran_order=False, shape=(end, 3))
    try:
        with open(part, "wb") as out:  # not a memory map, whose writes would kill this process on a full disk
            np.lib.format.write_array_header_1_0(out, header)
            for i in numbers:
                out.write(source.load(i).tobytes())
        np.savez(whole, ends=np.array(ends), labels=labels, names=names)
        path.with_suffix(".npz").unlink(missing_ok=True)  # an earlier packing's, which belongs to other points
        part.replace(path)
        whole.replace(path.with_suffix(".npz"))
    except OSError as error:
        size = end * 3 * dtype.itemsize / 1e9
        raise UserError(f"{path} cannot be written ({reason(error)}): make room for {size:.3f} GB") from None
    finally:
        part.unlink(missing_ok=True)
        whole.unlink(missing_ok=True)


def _again(name: str) -> str:
    return f"run `python -m pointcloud.pack {name}` again, or remove both"


def main(dataset: tyro.conf.Positional[Literal["shapenet", "shapenet55"]]) -> None:
    """Packs a release of ShapeNet. It is read from the folder CO2_DATA, and the packed files are written there."""
    root = data_root()
    if not os.access(root, os.W_OK):
        raise UserError(f"CO2_DATA={root} cannot be written to: give a folder of your own that links to the data")
    for split in SPLITS:
        source, path = unpacked(dataset, split), packed_path(root, dataset, split)
        pack(source, path)
        print(f"{path}: {len(source):,} clouds, {path.stat().st_size / 1e9:.3f} GB")


if __name__ == "__main__":
    launch(lambda: tyro.cli(main, prog="pointcloud.pack"))
