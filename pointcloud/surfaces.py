"""Analytic surfaces sampled uniformly by area: real geometry that needs no download.

Every sampler takes a numpy Generator and a number of points, and returns float64 [points, 3] on a closed surface
centred on the origin (the cone: at half its height), upright along z. Lengths are in arbitrary units.
"""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

Points = np.ndarray


def sphere(rng: Generator, points: int) -> Points:
    """Unit sphere: normalised Gaussian vectors have no preferred direction."""
    x = rng.standard_normal((points, 3))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def ellipsoid(rng: Generator, points: int, axes: np.ndarray) -> Points:
    """Ellipsoid with semi-axes [3]: keeps directions in proportion to the area around them, prod(axes) |u / axes|."""

    def propose(count: int) -> Points:
        u = sphere(rng, count)
        stretch = np.linalg.norm(u / axes, axis=1) * np.min(axes)  # at most 1
        return u[rng.random(count) < stretch] * axes

    return _until(propose, points)


def torus(rng: Generator, points: int, major: float, minor: float) -> Points:
    """Torus around z: tube radius `minor` at distance `major` > `minor`; area grows with the distance from z."""

    def propose(count: int) -> Points:
        around, tube = 2 * np.pi * rng.random((2, count))
        distance = major + minor * np.cos(tube)
        x = np.stack([distance * np.cos(around), distance * np.sin(around), minor * np.sin(tube)], axis=1)
        return x[rng.random(count) < distance / (major + minor)]

    return _until(propose, points)


def box(rng: Generator, points: int, size: np.ndarray) -> Points:
    """Box with edges [3]: a face chosen by its area, then a point of it."""
    areas = np.prod(size) / size  # of the two faces across each axis
    axis = rng.choice(3, points, p=areas / areas.sum())
    x = rng.uniform(-0.5, 0.5, (points, 3))
    x[np.arange(points), axis] = rng.choice([-0.5, 0.5], points)
    return x * size


def cylinder(rng: Generator, points: int, radius: float, height: float) -> Points:
    """Closed cylinder along z; side 2 pi r h, each cap pi r^2."""
    caps = rng.random(points) < radius / (radius + height)
    # The square root makes a disc uniform by area.
    distance = np.where(caps, radius * np.sqrt(rng.random(points)), radius)
    z = np.where(caps, rng.choice([-0.5, 0.5], points), rng.uniform(-0.5, 0.5, points)) * height
    return _around_z(rng, distance, z)


def cone(rng: Generator, points: int, radius: float, height: float) -> Points:
    """Closed cone, apex up; base pi r^2, side pi r sqrt(r^2 + h^2)."""
    base = rng.random(points) < radius / (radius + np.hypot(radius, height))
    # Unrolled, the side is a disc's sector: its area up to a share s of the way from the apex grows with s^2.
    share = np.sqrt(rng.random(points))
    z = np.where(base, -0.5, 0.5 - share) * height
    return _around_z(rng, radius * share, z)


def capsule(rng: Generator, points: int, radius: float, height: float) -> Points:
    """Cylinder of `height` with half-spheres for caps; side 2 pi r h, the two halves 4 pi r^2."""
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


def random_surface(rng: Generator, points: int) -> tuple[str, Points]:
    """A kind from `KINDS` with random proportions, turned by a random angle about z: (kind, float64 [points, 3])."""
    kind = str(rng.choice(list(KINDS)))
    x = KINDS[kind](rng, points)
    angle = 2 * np.pi * rng.random()
    c, s = np.cos(angle), np.sin(angle)
    return kind, x @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])


def _until(propose: Callable[[int], Points], points: int) -> Points:
    """Collects what rejection sampling lets through until `points` are there."""
    kept = propose(2 * points)
    while len(kept) < points:
        kept = np.concatenate([kept, propose(2 * points)])
    return kept[:points]


def _around_z(rng: Generator, distance: Points, z: Points) -> Points:
    angle = 2 * np.pi * rng.random(len(z))
    return np.stack([distance * np.cos(angle), distance * np.sin(angle), z], axis=1)
