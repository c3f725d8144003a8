"""The settings of a language modeling run."""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import tyro

from core.errors import UserError
from core.groups import local_world_size
from language.zeroth import ZerothConfig  # this also registers method zo
from language.zeroth.order import Place
from training.optim import OptimConfig
from training.recipe import MethodName, Recipe

ModelName = Literal[
    "gpt2_tiny", "gpt2_small", "gpt2_medium", "gpt2_large", "gpt2_xl",
    "roberta_tiny", "roberta_base", "roberta_large", "transnormer_tiny", "transnormer_7b",
]  # fmt: skip
TextMethod = Literal[MethodName, "zo"]
CorpusName = Literal["pydoc", "gutenberg", "openwebtext", "wikibooks", "wikitext103"]
GPT2_VOCABULARY = 50257  # as in nanoGPT's prepare.py; the end-of-text token is the last one


@dataclass(frozen=True)
class RingsConfig:
    """Settings of balance rings."""

    costs: tuple[float, ...] = ()
    """Measured costs, to skip the measurement at the start, which prints them. The first four are seconds per layer for
    both passes: attention per squared token, the rest per token, a ring's hop, and each token of a hop. Two more give
    the hop's costs for islands that span machines."""


@dataclass(frozen=True)
class TextRecipe(Recipe):
    """Settings that training from scratch and fine-tuning share."""

    batch_norm: ClassVar[bool] = False
    method: TextMethod = "co2"
    """Training method. All local methods use co2.tau as their number of local steps. zo has no backward pass, and its
    workers exchange only losses."""
    zeroth: Annotated[ZerothConfig, tyro.conf.arg(help="Settings of method zo.")] = field(default_factory=ZerothConfig)
    offload: bool = False
    """Keep CO2's outer state and its all-reduce in the host's memory, without a copy of the parameters on a GPU. With
    method zo, keep the model's blocks on the host, with three at a time on the GPU."""
    epoch_steps: int | None = None
    """Optimizer steps that count as an epoch. None means one pass over the data."""
    balance: Literal["none", "round", "rings"] = "none"
    """Train on whole documents, several per row without attention between them, each on one worker. round gives all
    workers equal work and equally many tokens per round. rings is as round among nodes, and the workers of a node
    (per_node) split long documents. none uses windows of the text, which run across documents, or equally many prompts
    per worker."""
    rings: RingsConfig = field(default_factory=RingsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "zo":
            self._check_zeroth_order()
        self.check_least(epoch_steps=1)
        if self.balance != "none":
            self._check_balance()
        if self.balance == "rings" or self.rings != RingsConfig():
            self._check_rings()

    def _check_zeroth_order(self) -> None:
        """Refuses settings that zeroth-order steps would not use: gradients, and most settings of the optimizer."""
        self.leave_out("with method 'zo', which does not use it", per_node=1, zero=0, recompute=False)
        usual = OptimConfig("sgd", momentum=0.0)
        for name in ("name", "momentum", "weight_decay", "clip_grad_norm"):
            if (value := getattr(self.optim, name)) != (needed := getattr(usual, name)):
                raise UserError(
                    f"optim.{name}={value!r} with method 'zo', which has no gradients: give --optim.{name} {needed}, "
                    "or start from recipe gpt2_zo_small"
                )

    def _check_balance(self) -> None:
        """Refuses settings that do not work with whole documents."""
        rings, meet = self.balance == "rings", "whose workers of a node meet at every step"
        for ok, what, why in (
            (self.method != "zo", "method='zo'", "whose workers exchange losses at every step"),
            (not self.elastic, "elastic", "whose workers change within a round"),
            (rings or self.per_node == 1, f"per_node={self.per_node}", meet),
            (rings or not self.zero, f"zero={self.zero}", meet),
            (self.zero < 2, f"zero={self.zero}", "whose parameters are not whole when a ring's costs are measured"),
            (not rings or not self.dry_run, "dry_run", "which does not know how documents are split"),
            (not self.loader_workers, f"loader_workers={self.loader_workers}", "which read ahead of the next tau"),
        ):
            if not ok:
                raise UserError(f"balance={self.balance!r} does not go with {what}, {why}: leave one of them out")

    def _check_rings(self) -> None:
        """Refuses an island of one worker, and wrong settings of rings."""
        costs = self.rings.costs
        if self.balance == "rings" and self.per_node == 1:
            raise UserError("balance='rings' with per_node=1: nobody could split a document; add --per_node 2 or more")
        if self.balance != "rings":
            raise UserError(f"rings.costs={costs} is balance rings' own: leave it out, or add --balance rings")
        if costs and (len(costs) not in (4, 6) or not all(0 <= cost < math.inf for cost in costs)):
            raise UserError(f"rings.costs={' '.join(map(str, costs))}: give 4 or 6 numbers, 0 or more")

    def data_workers(self, workers: int) -> int:
        """Returns how many workers get different data.

        With balance rings a node counts as one worker. With method zo two workers may get the same data.
        """
        if self.balance == "rings":
            return max(1, workers // (self.per_node or local_world_size()))
        if self.method == "zo":
            return Place(0, workers).data_workers
        return super().data_workers(workers)


@dataclass(frozen=True)
class LanguageRecipe(TextRecipe):
    """Settings of a language model and its text."""

    model: ModelName = "gpt2_tiny"
    """The model and its size."""
    corpus: CorpusName = "pydoc"
    """The text. pydoc comes with Python. All other corpora are read from the folder CO2_DATA."""
    vocab_size: int = 1024
    """Tokens of the vocabulary. pydoc and gutenberg train one of this size; for other corpora it is checked."""
    context: int = 128
    """Tokens per sample."""
    dropout: float = 0.0
    """Dropout of GPT-2 and RoBERTa."""
    eval_tokens: int | None = None
    """Held-out tokens for evaluations during training, with results named val_part_*. None means all tokens. The last
    evaluation always uses all tokens, with results named val_*."""
    wikitext2: bool = False
    """Evaluate on WikiText-2's test text too, at the end."""
    layout: str = ""
    """Layout of GPT-2 on the workers, such as tp2.pp2.dp2 or tp2.dp4.fsdp.co2x2 (docs/planning.md). If empty,
    --per_node and --zero apply."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(context=4, eval_tokens=self.context + 1)
        if self.balance != "none" and not self.model.startswith("gpt2"):
            raise UserError(f"balance={self.balance!r} does not go with model={self.model}: give a GPT-2, or none")
        if self.balance != "none" and self.dropout:
            remedy = "which attention to documents lacks: add --dropout 0"
            raise UserError(f"balance={self.balance!r} does not go with dropout={self.dropout}, {remedy}")
        self.check(dropout=(0, 0.99), vocab_size=(1, 10**6), context=(4, 10**6))
