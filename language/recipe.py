"""What a language modelling run can be told."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from core.errors import UserError
from core.placement import local_world_size
from language.zeroth import ZerothConfig  # and registers method zo
from language.zeroth.order import Place
from training.optim import OptimConfig
from training.recipe import MethodName, Recipe

ModelName = Literal[
    "gpt2_tiny", "gpt2_mini", "gpt2_midi", "gpt2_small", "gpt2_medium", "gpt2_large",
    "roberta_tiny", "roberta_mini", "roberta_base", "roberta_large", "transnormer_tiny", "transnormer_7b",
]  # fmt: skip
TextMethod = Literal[MethodName, "zo"]
CorpusName = Literal["pydoc", "gutenberg", "openwebtext", "wikibooks", "wikitext103"]
LinearAttention = Literal["torch", "fla"]
GPT2_VOCABULARY = 50257  # nanoGPT's prepare.py; its end-of-text token is the last one


@dataclass(frozen=True)
class RingsConfig:
    """Settings of balance rings."""

    room: int | None = None
    """Tokens of a row that fit in a worker's memory. Longer documents are split. None: no limit."""
    costs: tuple[float, ...] = ()
    """Seconds of a layer, forward and backward: attention per squared token, the rest per token, a hop of a ring, a hop
    per token. If an island spans machines, also the last two between machines. Empty: measured at the start, and
    printed."""


@dataclass(frozen=True)
class TextRecipe(Recipe):
    """What training from scratch and fine-tuning have in common."""

    method: TextMethod = "co2"
    """How workers synchronize. co2.tau is the period of every local method. zo has no backward pass, and its workers
    exchange only losses."""
    zeroth: Annotated[ZerothConfig, tyro.conf.arg(help="Settings of method zo.")] = field(default_factory=ZerothConfig)
    offload: bool = False
    """Keeps CO2's outer state and its all-reduce in host memory, so a GPU holds no copy of the parameters. With method
    zo it keeps the model's blocks there. Three at a time are on the GPU, and per_node workers upload a part each."""
    epoch_steps: int | None = None
    """Optimiser steps that count as an epoch; None for one pass over the data."""
    loader_workers: int = 0
    """Processes per worker that read and mask batches ahead; 0 for none."""
    balance: Literal["none", "tokens", "round", "rings"] = "none"
    """Trains on whole documents, several per row without attention between them. round: all workers have equal work and
    equal tokens per round. tokens: each document goes to the worker with the fewest tokens. rings: as round between
    nodes, and the workers of a node (per_node) split long documents. none: windows of the text across documents, or
    equally many prompts per worker."""
    crossing: float | None = None
    """With balance round and rings: the length in tokens at which attention costs as much as the rest of the model.
    None: 12 times the model's width."""
    rings: RingsConfig = field(default_factory=RingsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "zo":
            self._check_zeroth_order()
        self.check(loader_workers=(0, 1000))
        self.check_least(epoch_steps=1)
        if self.crossing is not None and not self.crossing > 0:
            raise UserError(f"crossing={self.crossing}: give tokens, above 0")
        if self.crossing is not None and self.balance not in ("round", "rings"):
            raise UserError(f"crossing={self.crossing} is balance round's own: leave it out, or add --balance round")
        if self.balance != "none":
            self._check_balance()
        if self.balance == "rings" or self.rings != RingsConfig():
            self._check_rings()

    def _check_zeroth_order(self) -> None:
        """Refuses settings that zeroth-order steps ignore, which concern gradients and optimizers."""
        unused = {"per_node": 1, "zero": 0, "recompute": False, "compile": False}
        if self.offload:  # the workers of a node share uploads
            del unused["per_node"]
        for name, needed in unused.items():
            if (value := getattr(self, name)) != needed:
                raise UserError(f"{name}={value!r} with method 'zo', which makes no use of it: leave it out")
        usual = OptimConfig("sgd", momentum=0.0)
        for name in ("name", "momentum", "weight_decay", "clip_grad_norm"):
            if (value := getattr(self.optim, name)) != (needed := getattr(usual, name)):
                instead = ", and --zeroth.weight_decay for that" if name == "weight_decay" else ""
                raise UserError(
                    f"optim.{name}={value!r} with method 'zo', which has no gradients: give --optim.{name} {needed}"
                    f"{instead}, or start from recipe gpt2_zo_small"
                )

    def _check_balance(self) -> None:
        """Refuses what does not go with documents that are dealt over a round."""
        rings, meet = self.balance == "rings", "whose workers of a node meet at every step"
        for ok, what, why in (
            (self.method != "zo", "method='zo'", "whose workers exchange losses at every step"),
            (not self.elastic, "elastic", "whose workers change within a round"),
            (rings or self.per_node == 1, f"per_node={self.per_node}", meet),
            (rings or not self.zero, f"zero={self.zero}", meet),
            (self.zero < 2, f"zero={self.zero}", "whose parameters are not whole when a ring's costs are measured"),
            (not rings or not self.dry_run, "dry_run", "which does not know how documents are split"),
            (not self.compile, "compile", "which would compile every step's documents anew"),
            (not self.loader_workers, f"loader_workers={self.loader_workers}", "which read ahead of the next tau"),
        ):
            if not ok:
                raise UserError(f"balance={self.balance!r} does not go with {what}, {why}: leave one of them out")

    def _check_rings(self) -> None:
        """Refuses an island of one worker, and what it cannot be told."""
        room, costs = self.rings.room, self.rings.costs
        if self.balance == "rings" and self.per_node == 1:
            raise UserError("balance='rings' with per_node=1: nobody could split a document; add --per_node 2 or more")
        if self.balance != "rings":
            given = f"costs={costs}" if costs else f"room={room}"
            raise UserError(f"rings.{given} is balance rings' own: leave it out, or add --balance rings")
        if room is not None and room < 1:
            raise UserError(f"rings.room={room}: give tokens, 1 or more")
        if costs and (len(costs) not in (4, 6) or min(costs) < 0):
            raise UserError(f"rings.costs={' '.join(map(str, costs))}: give 4 or 6 numbers, 0 or more")

    def data_workers(self, workers: int) -> int:
        """With balance rings a node takes as one worker does; with method zo two workers may take the same part."""
        if self.balance == "rings":
            return max(1, workers // (self.per_node or local_world_size()))
        if self.method == "zo":
            return Place.make(0, workers, self.zeroth).data_workers
        return super().data_workers(workers)


@dataclass(frozen=True)
class LanguageRecipe(TextRecipe):
    """A language model and its text."""

    model: ModelName = "gpt2_tiny"
    corpus: CorpusName = "pydoc"
    """pydoc comes with Python; the others are read from the folder CO2_DATA."""
    init_from: Path | None = None
    """The run folder of a model of the same sizes, from whose newest checkpoint the weights are taken; None: random."""
    vocab_size: int = 1024
    """Tokens of the vocabulary: trained for pydoc and gutenberg, checked against the token files otherwise."""
    context: int = 128
    """Tokens per sample."""
    dropout: float = 0.0
    eval_tokens: int | None = None
    """Held-out tokens to evaluate on while training, None for all; their results are named val_part_*. At the end it is
    always all: val_*."""
    wikitext2: bool = False
    """Evaluate on WikiText-2's test text, too, at the end."""
    layout: str = ""
    """How GPT-2 is split over the workers, such as tp2.pp2.dp2 or tp2.dp4.fsdp.co2x2 (docs/planning.md). Empty: as
    --per_node and --zero say."""
    linear_attention: LinearAttention = "torch"
    """How TransNormer's attention is computed on GPUs: by torch, or by flash-linear-attention's Triton kernels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(context=4, eval_tokens=self.context + 1)
        if self.linear_attention != "torch" and not self.model.startswith("transnormer"):
            raise UserError(
                f"linear_attention={self.linear_attention} is TransNormer's, not {self.model}'s: leave it out"
            )
        if self.balance != "none":
            self._check_model()
        self.check(dropout=(0, 0.99), vocab_size=(1, 10**6), context=(4, 10**6))

    def _check_model(self) -> None:
        """Refuses a model that cannot be trained on rows of documents."""
        linear = self.model.startswith("transnormer") and self.balance != "tokens"
        for ok, what, remedy in (
            (not self.model.startswith("roberta"), f"model={self.model}", "whose masks are windows': leave it out"),
            (not self.dropout, f"dropout={self.dropout}", "which attention to documents lacks: add --dropout 0"),
            (not linear, f"model={self.model}", "whose attention costs no square: add --balance tokens"),
        ):
            if not ok:
                raise UserError(f"balance={self.balance!r} does not go with {what}, {remedy}")
