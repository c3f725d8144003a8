"""A causal language model with linear attention, in the style of TransNormerLLM (arXiv 2307.14995).

Each layer mixes tokens by linear attention with exponential decay, and gates the result. Then it mixes channels by a
gated linear unit without activation. Both parts are pre-normalized by SimpleRMSNorm, which has no parameters. Attention
is computed in chunks (the idea of lightning attention), so its cost is linear in sequence length. There are no position
embeddings: order comes from the decay and, in the first layer, from LRPE's rotation.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput


@dataclass(frozen=True)
class TransNormerConfig:
    """Sizes of the model.

    Attributes:
        vocab_size: Tokens in the vocabulary.
        layers: Number of layers.
        width: Width of the residual stream, a multiple of `heads`.
        heads: Number of attention heads.
        glu_width: Width of the channel mixer.
        chunk: Tokens per chunk of the attention.
    """

    vocab_size: int
    layers: int
    width: int
    heads: int
    glu_width: int
    chunk: int = 64


class TransNormer(nn.Module):
    """Maps int64 token ids [batch, time] of any length to CausalLMOutput with logits [batch, time, vocab_size]."""

    def __init__(self, config: TransNormerConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(TransNormerLayer(config, index) for index in range(config.layers))
        self.norm = srms_norm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.lm_head(self.norm(x)))


def srms_norm(width: int) -> nn.Module:
    """Returns SRMSNorm, x / (||x||_2 / sqrt(d)) over the last dimension, without a learned scale."""
    return nn.RMSNorm(width, eps=1e-6, elementwise_affine=False)


class TransNormerLayer(nn.Module):
    """Both mixers, each after a norm and inside a residual, from [batch, time, width] to the same shape."""

    def __init__(self, config: TransNormerConfig, index: int):
        super().__init__()
        self.norm = srms_norm(config.width)
        self.token_mixer = GatedLinearAttention(config, index)
        self.channel_mixer = SimpleGatedUnit(config.width, config.glu_width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mixer(self.norm(x))
        return x + self.channel_mixer(self.norm(x))


class GatedLinearAttention(nn.Module):
    """Norm(decayed linear attention) * gate, with swish on queries and keys, for [batch, time, width]."""

    slope: Tensor

    def __init__(self, config: TransNormerConfig, index: int):
        super().__init__()
        self.heads, self.chunk = config.heads, config.chunk
        self.projection = nn.Linear(config.width, 4 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.norm = srms_norm(config.width)
        self.lrpe = LRPE(config.heads, config.width // config.heads) if index == 0 else None
        self.register_buffer("slope", decay_slopes(config.heads, index, config.layers), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, gate = self.projection(x).chunk(4, dim=-1)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value))
        query, key = F.silu(query), F.silu(key)
        # The running sum of outer products needs float32, also if autocast computes in bfloat16.
        with torch.autocast(x.device.type, enabled=False):
            query, key, value = query.float(), key.float(), value.float()
            if self.lrpe is not None:
                query, key = self.lrpe(query), self.lrpe(key)
            mixed = chunked_attention(query, key, value, self.slope, self.chunk)
        mixed = self.norm(mixed.transpose(1, 2).flatten(2)).to(gate.dtype)
        return self.output(mixed * gate)


class SimpleGatedUnit(nn.Module):
    """SGLU for [..., width]: the product of two linear maps, mapped back, without activation."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.up(x).chunk(2, dim=-1)
        return self.down(left * right)


class LRPE(nn.Module):
    """Linearized relative positions, from [batch, heads, time, d] to [batch, heads, time, 2 d].

    x_t becomes [x_t cos(theta t), x_t sin(theta t)], so products of queries and keys depend only on t - s. theta is
    learned, and starts as a geometric series.
    """

    def __init__(self, heads: int, dim: int):
        super().__init__()
        self.theta = nn.Parameter((10000.0 ** (-torch.arange(dim) / dim)).repeat(heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        time = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None]
        angle = self.theta.to(x.dtype) * time
        return torch.cat((x * angle.cos(), x * angle.sin()), dim=-1)


def decay_slopes(heads: int, layer: int, layers: int) -> Tensor:
    """Returns the decay rate of each head, float32 [heads], in (0, 1]. A token n steps back weighs exp(-slope n).

    The rates are geometric over the heads (2^(-8 h / H), h = 1 ... H, as in ALiBi). They fall linearly over the layers,
    to almost nothing in the last. They are not learned.
    """
    geometric = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float32) / heads)
    return geometric * (1.0 - layer / max(layers - 1, 1) + 1e-5)


def chunked_attention(query: Tensor, key: Tensor, value: Tensor, slope: Tensor, chunk: int) -> Tensor:
    """Returns o_t = sum over s <= t of exp(-slope (t - s)) (q_t . k_s) v_s, in time linear in the sequence length.

    Earlier chunks enter by a running sum of k_s v_s^T.

    Args:
        query: [batch, heads, time, d].
        key: [batch, heads, time, d].
        value: [batch, heads, time, e], the shape of the output.
        slope: [heads].
        chunk: Tokens per chunk.
    """
    time = query.shape[-2]
    padding = -time % chunk  # zero keys at the end change nothing before it
    query, key, value = (F.pad(t, (0, 0, 0, padding)).unflatten(-2, (-1, chunk)) for t in (query, key, value))
    slope = slope[:, None]
    position = torch.arange(chunk, device=query.device)
    since_start = torch.exp(-slope * (position + 1))[:, None, :, None]  # [heads, 1, chunk, 1]
    until_end = torch.exp(-slope * (chunk - 1 - position))[:, None, :, None]
    distance = position[:, None] - position
    decay = torch.exp(-slope[..., None] * distance.clamp(min=0)) * (distance >= 0)  # [heads, chunk, chunk]
    inside = (query @ key.transpose(-1, -2) * decay[:, None]) @ value
    sums = (key * until_end).transpose(-1, -2) @ value  # [batch, heads, chunks, d, e]
    states, fade = [torch.zeros_like(sums[:, :, 0])], torch.exp(-slope[..., None] * chunk)
    for added in sums.unbind(dim=2):  # at each chunk's start: S_{n+1} = fade S_n + sums_n
        states.append(fade * states[-1] + added)
    before = torch.stack(states[:-1], dim=2)
    return (inside + (query * since_start) @ before).flatten(2, 3)[:, :, :time]
