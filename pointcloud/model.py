"""Autoencoders for point clouds: a PointNet encoder with a folding or a fully connected decoder.

Every model of this domain maps points [B, n, 3] to a `Reconstruction`, so one training loop serves them all.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from core import UserError

Decoder = Literal["folding", "mlp"]


class Reconstruction(NamedTuple):
    """What a model returns. Its loss is a distance (`pointcloud.losses`) between `prediction` and `target`."""

    prediction: Tensor  # [K, m, 3]: whole clouds (K = B), or masked patches
    target: Tensor  # [K, m', 3]
    cloud: Tensor  # [B, p, 3], the whole reconstructed cloud
    visible: Tensor  # [B, v, 3], the points that the model was shown


@dataclass(frozen=True)
class AutoencoderConfig:
    """PointNet encoder and decoder; the defaults are sized as in FoldingNet's comparison (arXiv 1712.07262)."""

    decoder: Decoder = "folding"
    encoder_widths: tuple[int, ...] = (64, 128, 128, 256)
    latent: int = 512
    folding_width: int = 512
    mlp_widths: tuple[int, ...] = (1024, 2048)

    def __post_init__(self) -> None:
        for name in ("encoder_widths", "latent", "folding_width", "mlp_widths"):
            value = getattr(self, name)
            widths = value if isinstance(value, tuple) else (value,)
            if not all(1 <= width <= 10**6 for width in widths):
                raise UserError(f"autoencoder.{name}={value}: give numbers from 1 to 1000000")


class PointNetEncoder(nn.Module):
    """One small network applied to every point, then the maximum (PointNet, arXiv 1612.00593), without transforms."""

    def __init__(self, widths: tuple[int, ...], latent: int):
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((3, *widths), widths, strict=False):
            layers += [nn.Conv1d(inputs, outputs, 1, bias=False), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Conv1d((3, *widths)[-1], latent, 1))

    def forward(self, points: Tensor) -> Tensor:
        """[B, n, 3] -> [B, latent]; the order of the points does not matter."""
        return self.layers(points.mT).amax(dim=2)


class Fold(nn.Module):
    """One folding: a two-hidden-layer network on each [coordinates, code], giving new 3-D coordinates."""

    def __init__(self, dims: int, latent: int, width: int):
        super().__init__()
        # The first layer on a concatenation is the sum of two: the code's share is computed once a cloud.
        self.code = nn.Linear(latent, width, bias=False)
        self.coordinates = nn.Linear(dims, width)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, coordinates: Tensor, code: Tensor) -> Tensor:
        """coordinates [B or 1, m, dims], code [B, latent] -> [B, m, 3]."""
        return self.rest(self.coordinates(coordinates) + self.code(code)[:, None])


class FoldingDecoder(nn.Module):
    """Folds a square grid twice into the shape (FoldingNet, arXiv 1712.07262): 2,025 points for 2,048."""

    def __init__(self, points: int, latent: int, width: int):
        super().__init__()
        axis = torch.linspace(-0.3, 0.3, math.isqrt(points))
        self.register_buffer("grid", torch.cartesian_prod(axis, axis)[None], persistent=False)
        self.first, self.second = Fold(2, latent, width), Fold(3, latent, width)

    def forward(self, code: Tensor) -> Tensor:
        """[B, latent] -> [B, side^2, 3]."""
        return self.second(self.first(self.grid, code), code)


class MLPDecoder(nn.Module):
    """Fully connected layers that give all coordinates at once (Achlioptas et al., arXiv 1707.02392)."""

    def __init__(self, points: int, latent: int, widths: tuple[int, ...]):
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((latent, *widths), widths, strict=False):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Linear((latent, *widths)[-1], 3 * points))

    def forward(self, code: Tensor) -> Tensor:
        """[B, latent] -> [B, points, 3]."""
        return self.layers(code).unflatten(1, (-1, 3))


class Autoencoder(nn.Module):
    """Compresses a cloud to `latent` numbers, and reconstructs it with `points` points."""

    def __init__(self, points: int, config: AutoencoderConfig):
        super().__init__()
        self.encoder = PointNetEncoder(config.encoder_widths, config.latent)
        if config.decoder == "folding":
            self.decoder: nn.Module = FoldingDecoder(points, config.latent, config.folding_width)
        else:
            self.decoder = MLPDecoder(points, config.latent, config.mlp_widths)

    def forward(self, points: Tensor) -> Reconstruction:
        """float32 [B, n, 3] -> Reconstruction of the whole cloud."""
        cloud = self.decoder(self.encoder(points))
        return Reconstruction(prediction=cloud, target=points, cloud=cloud, visible=points)
