"""Analytic surfaces: every point lies on its surface, and equal areas get equal shares of the points."""

import numpy as np
import pytest
from scipy import integrate, stats

from pointcloud import sources

N = 40_000


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def assert_share(inside: np.ndarray, expected: float) -> None:
    """The share of points in a region equals its share of the area, within four standard errors."""
    assert abs(inside.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / len(inside))


def test_points_of_spheres_and_ellipsoids_follow_their_area(rng):
    x = sources.sphere(rng, N)
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1)
    assert stats.kstest(x[:, 2], "uniform", (-1, 2)).pvalue > 0.01  # Archimedes: area between heights is their distance
    a, c = 0.3, 1.0
    x = sources.ellipsoid(rng, N, np.array([a, a, c]))
    np.testing.assert_allclose((x / [a, a, c]) ** 2 @ np.ones(3), 1)

    def area(z):  # of a spheroid's ring at height z, up to a factor
        return np.sqrt(1 - (z / c) ** 2 * (1 - (a / c) ** 2))

    share = integrate.quad(area, 0.5, 1)[0] / integrate.quad(area, -1, 1)[0]
    assert_share(x[:, 2] > 0.5, share)


def test_a_torus_has_more_area_outside_and_a_boxs_faces_get_theirs(rng):
    major, minor = 1.0, 0.4
    x = sources.torus(rng, N, major, minor)
    distance = np.hypot(x[:, 0], x[:, 1])
    np.testing.assert_allclose(np.hypot(distance - major, x[:, 2]), minor)
    assert_share(distance > major, 0.5 + minor / (np.pi * major))
    x = sources.box(rng, N, np.array([1.0, 2.0, 4.0]))
    on_face = np.isclose(np.abs(x), [0.5, 1.0, 2.0])
    assert on_face.any(axis=1).all() and (np.abs(x) <= [0.5, 1.0, 2.0]).all()
    for axis, area in enumerate((8, 4, 2)):
        assert_share(on_face[:, axis], area / 14)
    assert_share(x[:, 2] > 1, (1 * 2 + 2 * 1 * 1 + 2 * 2 * 1) / 28)  # a cap, and a quarter of each long side


def test_cylinders_cones_and_capsules(rng):
    r, h = 0.5, 2.0
    x = sources.cylinder(rng, N, r, h)
    distance, cap = np.hypot(x[:, 0], x[:, 1]), np.isclose(np.abs(x[:, 2]), h / 2)
    np.testing.assert_allclose(distance[~cap], r)
    assert_share(cap, r / (r + h))
    assert_share(distance[cap] < r / 2, 0.25)
    r, h = 1.0, 2.0
    x = sources.cone(rng, N, r, h)
    distance, base = np.hypot(x[:, 0], x[:, 1]), np.isclose(x[:, 2], -h / 2)
    np.testing.assert_allclose(distance[~base], r * (h / 2 - x[~base, 2]) / h)
    assert_share(base, r / (r + np.sqrt(r**2 + h**2)))
    assert_share(x[~base, 2] > 0, 0.25)  # the upper half of the side is a cone of half the size
    r, h = 0.5, 2.0
    x = sources.capsule(rng, N, r, h)
    np.testing.assert_allclose(np.linalg.norm(x - np.clip(x, *[[0, 0, -h / 2], [0, 0, h / 2]]), axis=1), r)
    assert_share(np.abs(x[:, 2]) <= h / 2, h / (h + 2 * r))
    assert_share(x[:, 2] > 0, 0.5)


def test_random_surfaces_use_every_kind_and_repeat():
    drawn = [sources.random_surface(np.random.default_rng(i), 16) for i in range(200)]
    assert {kind for kind, _ in drawn} == set(sources.KINDS)
    again = [sources.random_surface(np.random.default_rng(i), 16) for i in range(200)]
    assert all(np.array_equal(a[1], b[1]) for a, b in zip(drawn, again, strict=True))
    assert not np.array_equal(drawn[0][1], drawn[1][1])
