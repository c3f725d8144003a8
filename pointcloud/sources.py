"""Sources of clouds: ShapeNetCore in its two common releases, ModelNet10, and embedded analytic surfaces."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.random import Generator

from core import UserError
from training.data.files import data_root, entries, missing, read_arrays
from training.start.errors import explained

Points = np.ndarray


def sphere(rng: Generator, points: int) -> Points:
    """Returns points on the unit sphere. Normalized Gaussian vectors have no preferred direction."""
    x = rng.standard_normal((points, 3))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def ellipsoid(rng: Generator, points: int, axes: np.ndarray) -> Points:
    """Returns points on an ellipsoid with semi-axes [3].

    It keeps directions in proportion to the area around them, prod(axes) |u / axes|.
    """

    def propose(count: int) -> Points:
        u = sphere(rng, count)
        stretch = np.linalg.norm(u / axes, axis=1) * np.min(axes)  # at most 1
        return u[rng.random(count) < stretch] * axes

    return _until(propose, points)


def torus(rng: Generator, points: int, major: float, minor: float) -> Points:
    """Returns points on a torus around z, with a tube of radius `minor` at distance `major` > `minor`.

    Area grows with the distance from z.
    """

    def propose(count: int) -> Points:
        around, tube = 2 * np.pi * rng.random((2, count))
        distance = major + minor * np.cos(tube)
        x = np.stack([distance * np.cos(around), distance * np.sin(around), minor * np.sin(tube)], axis=1)
        return x[rng.random(count) < distance / (major + minor)]

    return _until(propose, points)


def box(rng: Generator, points: int, size: np.ndarray) -> Points:
    """Returns points on a box with edges [3]: a face chosen by its area, then a point of it."""
    areas = np.prod(size) / size  # areas of the two faces across each axis
    axis = rng.choice(3, points, p=areas / areas.sum())
    x = rng.uniform(-0.5, 0.5, (points, 3))
    x[np.arange(points), axis] = rng.choice([-0.5, 0.5], points)
    return x * size


def cylinder(rng: Generator, points: int, radius: float, height: float) -> Points:
    """Returns points on a closed cylinder along z, with side 2 pi r h and caps of pi r^2."""
    caps = rng.random(points) < radius / (radius + height)
    # The square root makes a disc uniform by area.
    distance = np.where(caps, radius * np.sqrt(rng.random(points)), radius)
    z = np.where(caps, rng.choice([-0.5, 0.5], points), rng.uniform(-0.5, 0.5, points)) * height
    return _around_z(rng, distance, z)


def cone(rng: Generator, points: int, radius: float, height: float) -> Points:
    """Returns points on a closed cone, apex up, with base pi r^2 and side pi r sqrt(r^2 + h^2)."""
    base = rng.random(points) < radius / (radius + np.hypot(radius, height))
    # Unrolled, the side is a sector of a disc. Its area up to a share s of the way from the apex grows with s^2.
    share = np.sqrt(rng.random(points))
    z = np.where(base, -0.5, 0.5 - share) * height
    return _around_z(rng, radius * share, z)


def capsule(rng: Generator, points: int, radius: float, height: float) -> Points:
    """Returns points on a cylinder of `height` with half-spheres for caps, with side 2 pi r h and caps of 4 pi r^2."""
    side = rng.random(points) < height / (height + 2 * radius)
    ball = radius * sphere(rng, points)
    ball[:, 2] += np.copysign(height / 2, ball[:, 2])
    tube = _around_z(rng, np.full(points, radius), rng.uniform(-0.5, 0.5, points) * height)
    return np.where(side[:, None], tube, ball)


KINDS: dict[str, Callable[[Generator, int], Points]] = {
    "sphere": sphere,
    "ellipsoid": lambda rng, n: ellipsoid(rng, n, rng.uniform(0.2, 1.0, 3)),
    "torus": lambda rng, n: torus(rng, n, 1.0, rng.uniform(0.15, 0.6)),
    "box": lambda rng, n: box(rng, n, rng.uniform(0.2, 1.0, 3)),
    "cylinder": lambda rng, n: cylinder(rng, n, rng.uniform(0.2, 1.0), rng.uniform(0.3, 2.0)),
    "cone": lambda rng, n: cone(rng, n, rng.uniform(0.3, 1.0), rng.uniform(0.5, 2.0)),
    "capsule": lambda rng, n: capsule(rng, n, rng.uniform(0.2, 0.6), rng.uniform(0.3, 2.0)),
}


def random_surface(rng: Generator, points: int) -> Points:
    """Returns a surface from `KINDS` with random proportions, turned about z at random, float64 [points, 3]."""
    x = KINDS[str(rng.choice(list(KINDS)))](rng, points)
    angle = 2 * np.pi * rng.random()
    c, s = np.cos(angle), np.sin(angle)
    return x @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])


def _until(propose: Callable[[int], Points], points: int) -> Points:
    """Collects the results of rejection sampling until there are `points`."""
    kept = propose(2 * points)
    while len(kept) < points:
        kept = np.concatenate([kept, propose(2 * points)])
    return kept[:points]


def _around_z(rng: Generator, distance: Points, z: Points) -> Points:
    angle = 2 * np.pi * rng.random(len(z))
    return np.stack([distance * np.cos(angle), distance * np.sin(angle), z], axis=1)


# -- data sets --------------------------------------------------------------------------------------------------------


SPLITS = ("train", "test")
STAND_IN = "surfaces_small"


class Files:
    """Clouds in one file each, float [n, 3]."""

    files: list[Path]

    def __len__(self) -> int:
        return len(self.files)

    def load(self, index: int) -> np.ndarray:
        """Returns the cloud, unchecked. Raises UserError, with the file's name, if it cannot be read."""
        path = self.files[index]
        with explained(f"{path} cannot be read", "copy it again or remove it"), open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)  # np.load reads archives, too

    def name(self, index: int) -> str:
        """Returns the cloud's file, and its place in the file if it holds several."""
        return str(self.files[index])


class ShapeNetPC15k(Files):
    """ShapeNetCore v2 as released with PointFlow (arXiv 1906.12320), with 15,000 points per shape.

    It reads `ShapeNetCore.v2.PC15k/<synset>/<split>/<model>.npy` for every synset that is there.
    """

    def __init__(self, root: Path, split: str):
        folder = root / "ShapeNetCore.v2.PC15k"
        synsets = [path for path in entries(folder) if path.is_dir()] if folder.is_dir() else []
        parts = [part for synset in synsets for part in entries(synset) if part.name == split]
        self.files = [file for part in parts for file in entries(part) if file.suffix == ".npy"]
        if not self.files:
            raise missing("data set shapenet", root, f"{folder.name}/<synset>/{split}/<model>.npy", STAND_IN)


class ShapeNet55(Files):
    """ShapeNet-55 as used by Point-BERT and Point-MAE (arXiv 2203.06604), with 8,192 points per shape.

    It reads `ShapeNet55-34/ShapeNet-55/<split>.txt`, a list of file names `<synset>-<model>.npy`, and the files in
    `ShapeNet55-34/shapenet_pc/`.
    """

    def __init__(self, root: Path, split: str):
        folder = root / "ShapeNet55-34"
        listing = folder / "ShapeNet-55" / f"{split}.txt"
        if not listing.is_file():
            files = f"{folder.name}/{{ShapeNet-55/{split}.txt,shapenet_pc/<synset>-<model>.npy}}"
            raise missing("data set shapenet55", root, files, STAND_IN)
        self.files = [folder / "shapenet_pc" / name for name in read_list(listing)]
        if not self.files:
            raise UserError(f"{listing} is empty: it should name one file of {folder / 'shapenet_pc'} a line")


def read_list(file: Path) -> list[str]:
    """Returns the names in a list, one per line. Raises UserError if it is not UTF-8, or has a name twice."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason}): convert it") from None
    if "\0" in text:
        raise UserError(f"{file} holds zero bytes, as UTF-16 does: convert it to UTF-8 text")
    names = [name for line in text.split("\n") if (name := line.strip())]
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise UserError(f"{file} names {twice} twice: remove one of the lines")
    return names


class ModelNet10:
    """ModelNet10 (Wu et al., CVPR 2015), with 1,024 points per shape: 3,991 shapes for training and 908 for testing.

    It reads x_<split>, float16 [n, 1024, 3], in `modelnet10_1024_fp16.npz`.
    """

    def __init__(self, root: Path, split: str):
        self.path, self.array = root / "modelnet10_1024_fp16.npz", f"x_{split}"
        if not self.path.is_file():
            raise missing("data set modelnet10", root, f"{self.path.name} with {self.array}", STAND_IN)
        (self.clouds,) = read_arrays(self.path, self.array)
        if self.clouds.ndim != 3 or not len(self.clouds):
            found = f"{self.array} {list(self.clouds.shape)}"
            raise UserError(f"{self.path}: {found}: expected [n, points, 3]; copy it again")

    def __len__(self) -> int:
        return len(self.clouds)

    def load(self, index: int) -> np.ndarray:
        return self.clouds[index]

    def name(self, index: int) -> str:
        return f"{self.path}, {self.array}[{index}]"


class Surfaces:
    """Embedded analytic surfaces of random proportions (`pointcloud.sources`), each drawn from its own generator."""

    COUNTS = {"train": 4096, "test": 512}
    POINTS = 2048

    def __init__(self, root: Path, split: str):
        self.split, self.stream = split, SPLITS.index(split)

    def __len__(self) -> int:
        return self.COUNTS[self.split]

    def load(self, index: int) -> np.ndarray:
        return random_surface(np.random.default_rng((self.stream, index)), self.POINTS)

    def name(self, index: int) -> str:
        return f"analytic surface {index} ({self.split})"


Source = ShapeNetPC15k | ShapeNet55 | ModelNet10 | Surfaces
SOURCES = {"shapenet": ShapeNetPC15k, "shapenet55": ShapeNet55, "modelnet10": ModelNet10, "surfaces": Surfaces}


def load_source(name: str, split: str) -> Source:
    """Returns the clouds of a data set's split. Raises UserError if its release's files are missing."""
    return SOURCES[name](data_root(), split)
