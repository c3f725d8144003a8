"""Autoencoders for point clouds: a PointNet encoder with a folding or a fully connected decoder.

Every model of this domain maps points [B, n, 3] to a `Reconstruction`, so one training loop works for all of them.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from core import UserError

Decoder = Literal["folding", "mlp"]


class Reconstruction(NamedTuple):
    """The output of a model. Its loss is a distance (`pointcloud.losses`) between `prediction` and `target`."""

    prediction: Tensor  # [K, m, 3], whole clouds (K = B) or masked patches
    target: Tensor  # [K, m', 3]
    cloud: Tensor  # [B, p, 3], the whole reconstructed cloud
    visible: Tensor  # [B, v, 3], the points that the model was given


@dataclass(frozen=True)
class AutoencoderConfig:
    """A PointNet encoder and its decoder. The default sizes are from FoldingNet's comparison (arXiv 1712.07262)."""

    decoder: Decoder = "folding"
    """Decoder of the shape: folding (FoldingNet) or mlp (fully connected)."""
    encoder_widths: tuple[int, ...] = (64, 128, 128, 256)
    """Widths of the encoder's layers."""
    latent: int = 512
    """Numbers in a shape's code."""
    folding_width: int = 512
    """Width of the folding decoder's layers."""
    mlp_widths: tuple[int, ...] = (1024, 2048)
    """Widths of the fully connected decoder's layers."""

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
        """Returns [B, latent] for [B, n, 3]. The order of the points does not matter."""
        return self.layers(points.mT).amax(dim=2)


class Fold(nn.Module):
    """One folding: a network with two hidden layers on each [coordinates, code], which returns new 3-D coordinates."""

    def __init__(self, dims: int, latent: int, width: int):
        super().__init__()
        # The first layer on a concatenation is the sum of two layers. The code's part is computed once per cloud.
        self.code = nn.Linear(latent, width, bias=False)
        self.coordinates = nn.Linear(dims, width)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, coordinates: Tensor, code: Tensor) -> Tensor:
        """Returns [B, m, 3] for coordinates [B or 1, m, dims] and a code [B, latent]."""
        return self.rest(self.coordinates(coordinates) + self.code(code)[:, None])


class FoldingDecoder(nn.Module):
    """Folds a square grid twice into the shape (FoldingNet, arXiv 1712.07262), with 2,025 points for 2,048."""

    def __init__(self, points: int, latent: int, width: int):
        super().__init__()
        axis = torch.linspace(-0.3, 0.3, math.isqrt(points))
        self.register_buffer("grid", torch.cartesian_prod(axis, axis)[None], persistent=False)
        self.first, self.second = Fold(2, latent, width), Fold(3, latent, width)

    def forward(self, code: Tensor) -> Tensor:
        """Returns [B, side^2, 3] for [B, latent]."""
        return self.second(self.first(self.grid, code), code)


class MLPDecoder(nn.Module):
    """Fully connected layers that return all coordinates at once (Achlioptas et al., arXiv 1707.02392)."""

    def __init__(self, points: int, latent: int, widths: tuple[int, ...]):
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((latent, *widths), widths, strict=False):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Linear((latent, *widths)[-1], 3 * points))

    def forward(self, code: Tensor) -> Tensor:
        """Returns [B, points, 3] for [B, latent]."""
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
        """Returns the reconstruction of the whole cloud, for float32 [B, n, 3]."""
        cloud = self.decoder(self.encoder(points))
        return Reconstruction(prediction=cloud, target=points, cloud=cloud, visible=points)


# -- masked autoencoder -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskedAutoencoderConfig:
    """Settings of the masked autoencoder. The defaults are Point-MAE's for pre-training."""

    groups: int = 64
    """Number of patches per cloud."""
    group_size: int = 32
    """Number of points per patch."""
    mask_ratio: float = 0.6
    """Share of the patches to hide."""
    dim: int = 384
    """Width of the transformer."""
    depth: int = 12
    """Number of blocks in the encoder."""
    heads: int = 6
    """Number of attention heads."""
    decoder_depth: int = 4
    """Number of blocks in the decoder."""
    drop_path: float = 0.1
    """Rate of stochastic depth."""

    def __post_init__(self) -> None:
        for name in ("groups", "group_size", "dim", "depth", "heads", "decoder_depth"):
            if not 1 <= getattr(self, name) <= 10**6:
                raise UserError(f"mae.{name}={getattr(self, name)}: give a number from 1 to 1000000")
        if not 0 <= self.drop_path < 1:
            raise UserError(f"mae.drop_path={self.drop_path}: give a share, from 0 to below 1")
        if not 0 < self.mask_ratio < 1:
            raise UserError(f"mae.mask_ratio={self.mask_ratio}: give a share between 0 and 1")
        if not 0 < self.masked < self.groups:
            raise UserError(
                f"mask_ratio={self.mask_ratio:g} hides {self.masked} of {self.groups} groups: choose one that leaves "
                "at least one hidden and one visible"
            )
        if self.dim % self.heads:
            raise UserError(f"dim={self.dim} with heads={self.heads}: choose a multiple of the heads")

    @property
    def masked(self) -> int:
        """Number of hidden groups."""
        return int(self.mask_ratio * self.groups)


class PatchEmbedding(nn.Module):
    """A small PointNet that turns a patch into a token: two shared networks, each followed by a maximum."""

    def __init__(self, dim: int):
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU(inplace=True), nn.Conv1d(b, c, 1))
            for a, b, c in ((3, 128, 256), (512, 512, dim))
        )

    def forward(self, patch: Tensor) -> Tensor:
        """Returns tokens [B, g, dim] for patches [B, g, k, 3]."""
        features = self.first(patch.flatten(0, 1).mT)
        overall = features.amax(dim=2, keepdim=True).expand_as(features)
        token = self.second(torch.cat([overall, features], dim=1)).amax(dim=2)
        return token.unflatten(0, patch.shape[:2])


class Transformer(nn.Module):
    """timm's pre-norm blocks with the position embedding added before every block, and a final norm."""

    def __init__(self, dim: int, depth: int, heads: int, drop_path: float):
        # Imported here, because these take seconds, and --help needs only the settings above.
        import training.prepared  # noqa: F401

        # isort: split
        from timm.models.vision_transformer import Block

        super().__init__()
        rates = torch.linspace(0, drop_path, depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(Block(dim, heads, qkv_bias=False, drop_path=rate) for rate in rates)
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns [B, g, dim] for tokens and positions [B, g, dim]."""
        for block in self.blocks:
            tokens = block(tokens + positions)
        return self.norm(tokens)


class MaskedAutoencoder(nn.Module):
    """Hides most patches of a cloud and predicts their points from the rest.

    The encoder sees only visible patches. A lighter decoder gets its tokens, and one shared mask token for every hidden
    patch. Training draws masks from torch's global generator. Evaluations share one fixed mask, so that results depend
    neither on the batch nor on the rank.
    """

    def __init__(self, points: int, config: MaskedAutoencoderConfig):
        super().__init__()
        if points < max(config.groups, config.group_size):
            raise UserError(
                f"points={points}: too few for {config.groups} groups of {config.group_size}; give more points, or "
                "fewer groups"
            )
        self.config, self.masked, dim = config, config.masked, config.dim
        self.embedding = PatchEmbedding(dim)
        self.encoder_position, self.decoder_position = _position_embedding(dim), _position_embedding(dim)
        self.encoder = Transformer(dim, config.depth, config.heads, config.drop_path)
        self.decoder = Transformer(dim, config.decoder_depth, config.heads, config.drop_path)
        self.mask_token = nn.Parameter(torch.zeros(dim))
        self.head = nn.Linear(dim, 3 * config.group_size)
        self.apply(_initialise)
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(self, points: Tensor) -> Reconstruction:
        """Returns the reconstruction of clouds, float32 [B, n, 3].

        Prediction and target, [B * masked, k, 3], are relative to the centers. `cloud`, [B, groups * k, 3], has the
        visible and the predicted patches, which overlap.
        """
        patch, centres = patches(points, self.config.groups, self.config.group_size)
        order = self._mask_order(len(points), points.device)
        hidden, shown = order[:, : self.masked], order[:, self.masked :]
        predicted = self._predict(_pick(patch, shown), _pick(centres, shown), _pick(centres, hidden))
        visible = (_pick(patch, shown) + _pick(centres, shown)[:, :, None]).flatten(1, 2)
        filled = (predicted + _pick(centres, hidden)[:, :, None]).flatten(1, 2)
        return Reconstruction(
            prediction=predicted.flatten(0, 1),
            target=_pick(patch, hidden).flatten(0, 1),
            cloud=torch.cat([visible, filled], dim=1),
            visible=visible,
        )

    def _mask_order(self, batch: int, device: torch.device) -> Tensor:
        """Returns a permutation of the groups for each cloud, [B, groups]. The first `masked` groups are hidden."""
        groups = self.config.groups
        if self.training:
            # Drawn on the CPU, because checkpoints hold its generator's state.
            return torch.rand(batch, groups).argsort(dim=1).to(device)
        fixed = torch.randperm(groups, generator=torch.Generator().manual_seed(0)).to(device)
        return fixed.expand(batch, groups)

    def _predict(self, patch: Tensor, shown: Tensor, hidden: Tensor) -> Tensor:
        """Returns hidden patches [B, masked, k, 3], from visible patches [B, v, k, 3] and the centers of both kinds."""
        encoded = self.encoder(self.embedding(patch), self.encoder_position(shown))
        mask_tokens = self.mask_token.expand(*hidden.shape[:2], -1)
        positions = self.decoder_position(torch.cat([shown, hidden], dim=1))
        decoded = self.decoder(torch.cat([encoded, mask_tokens], dim=1), positions)
        return self.head(decoded[:, shown.shape[1] :]).unflatten(2, (-1, 3))


def _position_embedding(dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 128), nn.GELU(), nn.Linear(128, dim))


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """Returns x [B, g, ...] at index [B, j], as [B, j, ...]."""
    return torch.take_along_dim(x, index.reshape(*index.shape, *[1] * (x.dim() - 2)), dim=1)


def _initialise(module: nn.Module) -> None:
    """Initializes weights as in Point-MAE's encoder: truncated normal 0.02, zero biases. Norms keep torch's default."""
    if isinstance(module, (nn.Linear, nn.Conv1d)):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


# -- patches ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def farthest_points(x: Tensor, count: int) -> Tensor:
    """Returns farthest-point samples of x [B, n, 3] from point 0, int64 [B, count], as PointNet++'s kernel does."""
    chosen = torch.zeros(x.shape[0], count, dtype=torch.long, device=x.device)
    to_chosen = torch.full(x.shape[:2], torch.inf, dtype=x.dtype, device=x.device)
    for i in range(1, count):
        latest = torch.take_along_dim(x, chosen[:, i - 1, None, None], dim=1)
        to_chosen = torch.minimum(to_chosen, (x - latest).square().sum(dim=2))
        chosen[:, i] = to_chosen.argmax(dim=1)
    return chosen


@torch.no_grad()
def nearest_neighbours(x: Tensor, centres: Tensor, count: int) -> Tensor:
    """Returns the `count` points of x [B, n, 3] nearest to each center [B, g, 3], as indices int64 [B, g, count]."""
    distances = torch.cdist(centres, x, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.topk(count, dim=2, largest=False).indices


def patches(x: Tensor, groups: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns overlapping patches [B, groups, size, 3] of x [B, n, 3], relative to spread centers, and the centers."""
    centres = torch.take_along_dim(x, farthest_points(x, groups)[..., None], dim=1)
    members = nearest_neighbours(x, centres, size).flatten(1)
    grouped = torch.take_along_dim(x, members[..., None], dim=1).unflatten(1, (groups, size))
    return grouped - centres[:, :, None], centres
