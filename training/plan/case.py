"""Layouts of a model on a cluster, one or many, and the quantities that memory and time have in common."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from training.plan.clusters import Cluster, Numbers
from training.plan.model import Model

RECOMPUTE = ("none", "full")
WIRES = {"float32": 4.0, "int8": 260 / 256, "int4": 132 / 256}  # bytes an element: core/wires/formats.py
MERGES = ("keep", "mix", "outer")


@dataclass(frozen=True)
class Software:
    """What the training program does; the defaults are this project's with torch under autocast in 16 bits.

    parameter, gradient, optimizer, value: bytes of each parameter, and of a value that products take. stream: of a
    value between blocks, which autocast leaves in float32. fused: attention keeps no s x s matrix. overlap: DDP and
    FSDP2 communicate during computation. gloo: FSDP2 does not, a reduce-scatter is an all-reduce, a broadcast goes
    along a tree. megatron: hops [N sec. 4.1] and logits are cut over the TP ranks; no buffers for received tensors.
    reserve: bytes that none of the parts counts.
    """

    parameter: float = 4
    gradient: float = 4
    optimizer: float = 8
    value: float = 2
    stream: float = 4
    fused: bool = True
    overlap: bool = True
    gloo: bool = False
    megatron: bool = False
    reserve: float = 1.5 * (1 << 30)  # training/memory.py


MEGATRON = Software(2, 2, 12, stream=2, fused=False, overlap=False, megatron=True)  # of 2021: [N], [R 3.1]
FLOAT32 = Software(value=4, gloo=True, reserve=0.0)  # on CPUs


@dataclass(frozen=True)
class Layouts:
    """One layout, or as many as each field has numbers. dp: of an island. islands 1: ddp. micro: samples of a
    micro-batch. v: chunks of a stage's layers. recompute, wire, merge: indices of RECOMPUTE, WIRES, MERGES. offload 1:
    CO2's outer state lies in the host's memory."""

    tp: Numbers
    pp: Numbers
    dp: Numbers
    islands: Numbers
    micro: Numbers
    v: Numbers = 1
    zero: Numbers = 0
    recompute: Numbers = 0
    tau: Numbers = 1
    wire: Numbers = 0
    merge: Numbers = 0
    offload: Numbers = 0

    def __getitem__(self, k: Any) -> Layouts:
        """The k-th, or those of a mask."""
        return Layouts(*(np.broadcast_to(getattr(self, name), self.shape)[k] for name in AXES))

    @property
    def shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(np.shape(getattr(self, name)) for name in AXES))

    @property
    def ranks(self) -> Numbers:
        return self.tp * self.pp * self.dp * self.islands


AXES = tuple(field.name for field in dataclasses.fields(Layouts))


@dataclass(frozen=True)
class Case:
    """A model, a cluster, what the program does, samples of a step over all replicas, and layouts."""

    model: Model
    cluster: Cluster
    software: Software
    batch: int
    layout: Layouts

    @cached_property
    def micro_batches(self) -> Numbers:
        """m = B / (d I b)"""
        x = self.layout
        return self.batch // (x.dp * x.islands * x.micro)

    @cached_property
    def layers(self) -> Numbers:
        """l / p: of a stage"""
        return self.model.layers / self.layout.pp

    @cached_property
    def block(self) -> Numbers:
        """cut / t + whole: parameters of a layer on one device, ZeRO left out"""
        return self.model.cut / self.layout.tp + self.model.whole

    def own(self, last: bool) -> Numbers:
        """l/p block + V h/t + positions in the first stage, + V h/t + last norm in the last: parameters of a device

        A tied head is a copy of the embedding where the stages are two or more [N].
        """
        m, x = self.model, self.layout
        ends = m.embedding / x.tp
        alone = ends * (1 if m.tied else 2) + m.positions + m.last_norm
        of_end = ends + m.last_norm if last else ends + m.positions
        return self.layers * self.block + np.where(x.pp == 1, alone, of_end)

    @cached_property
    def largest(self) -> Numbers:
        """max(first, last): parameters of a device of the largest stage"""
        return np.maximum(self.own(False), self.own(True))

    @cached_property
    def kept(self) -> Numbers:
        """b s (4 h size + masks + 12 h size / t): of a layer, without scores [K eq. 2]"""
        m, x, size = self.model, self.layout, self.software.value
        outside = m.kept_whole * size + m.masks
        return x.micro * m.context * (outside + m.kept_cut * size / x.tp)

    @cached_property
    def scores(self) -> Numbers:
        """b s a s (2 size + 1) / t: bytes of attention's scores, of a layer [K eq. 2]; fused: none [F]"""
        if self.software.fused:
            return 0.0 * self.layout.tp
        return self.layout.micro * self.model.context * self.model.scores(self.software.value) / self.layout.tp

    @property
    def tokens(self) -> Numbers:
        """b s: of a micro-batch"""
        return self.layout.micro * self.model.context

    @cached_property
    def given(self) -> Numbers:
        """stream bytes * b s h: what a block gets"""
        return self.software.stream * self.tokens * self.model.width

    @cached_property
    def of_block(self) -> tuple[Numbers, Numbers]:
        """b s (whole + cut / t): bytes that a block keeps, and has more at its backward pass's peak [O]

        Megatron-LM's: `kept` and the scores; 0.
        """
        x, s = self.layout, self.software
        if s.megatron:
            return self.kept + np.where(x.recompute == 0, self.scores, 0.0), 0.0
        kept, more = (self.tokens * (whole + cut / x.tp) for whole, cut in self.model.in_block(s.value))
        return kept, more

    @cached_property
    def shares(self) -> Numbers:
        """d, but 1 with z < 2 and TP or stages: equal replicas of an island that share out CO2's outer state [C]"""
        x = self.layout
        return np.where((x.zero >= 2) | (x.tp * x.pp == 1), x.dp, 1)

    @cached_property
    def island(self) -> Numbers:
        """t p d: devices of an island"""
        return self.layout.tp * self.layout.pp * self.layout.dp
