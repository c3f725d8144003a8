"""The tables of the CO2 paper (arXiv 2401.16265) as data: the run of each row, and every value that we know.

The paper names ResNet-50, ViT-Base, GPT-2's sizes, RoBERTa and TransNormer-LLM 7B. We chose all other models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GPUS = 8  # in each node of the paper's clusters
METHODS = ("ddp", "local", "overlap_local", "slowmo", "co2")
# what CO2Config.recommended(tau=...) changes in our reading of the paper's rule
RECOMMENDED = {"co2.merge": "keep_local", "co2.gap": "none", "co2.delay": "auto", "co2.outer_momentum": 0.0}
RECOMMENDED |= {"co2.compression.format": "auto"}

# -- the paper's numbers ----------------------------------------------------------------------------------------

# (recipe, method) -> mean and standard deviation, in the unit of the table's metric
REPORTED: dict[tuple[str, str], tuple[float, float | None]] = {
    ("imagenet_resnet50", "ddp"): (76.92, 0.05),
    ("imagenet_resnet50", "co2"): (77.14, 0.09),
    ("imagenet_vit_base", "ddp"): (81.33, 0.04),
    ("imagenet_vit_base", "co2"): (80.95, 0.08),
    ("gpt2_small_owt", "slowmo"): (7.34, 0.89),
    ("gpt2_small_owt", "co2"): (7.37, 0.73),
    ("transnormer_7b_owt", "ddp"): (16.82, None),
}
GAP_PERPLEXITY = {"without": 7.56, "with": 7.39}  # GPT-2 Small without and with the staleness gap penalty
# (tau, nodes) -> words/s of all GPUs over 80 Gbps TCP/IP; tau None: AdamW, synchronous
WORDS_PER_SECOND = {(None, 1): 18_444, (None, 2): 3_488, (None, 16): 22_810, (48, 16): 304_736}
# (method, tau) -> throughput(128 GPUs) / (8 x throughput(16 GPUs)) there
SCALING_RATIO = {("ddp", None): 0.82, ("co2", 48): 1.06, ("co2", 12): 0.86}
TAUS = (1, 3, 6, 12, 24, 48, 96, 192)  # in which the paper searched

# -- what a table is made of ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A key of summary.json, the title of its column, and its display: times `scale`, in the format `spec`."""

    key: str
    title: str
    scale: float = 1.0
    spec: str = ".2f"


TOP1 = Metric("test_top1", "top-1, %", scale=100)
MIOU = Metric("val_mIoU", "mIoU, %")
CHAMFER = Metric("test_chamfer", "Chamfer distance", spec=".3g")
HIDDEN_CHAMFER = Metric("test_loss", "Chamfer distance of hidden patches", spec=".3g")
PERPLEXITY = Metric("val_perplexity", "perplexity")
TOKENS = Metric("tokens_per_second", "tokens/s", spec=",.0f")


@dataclass(frozen=True)
class Row:
    """One row of a table: its run, and the paper's value (None if we do not know it)."""

    label: str
    task: str
    """The package with train.py and recipes.py."""
    recipe: str
    method: str
    paper: tuple[float, float | None] | None
    local: str | None = None
    """The stand-in recipe for two CPU cores."""
    tau: int | None = None
    """None for the recipe's own. Runs with another tau have their own line, except stand-ins."""
    nodes: int | None = None
    """None for the recipe's own, as with tau."""
    network: str = ""
    """The network between the nodes, if the row compares networks. Part of the run folders' names."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the recipe, as on the command line. The stand-in gets the changes of co2, too."""
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def script(self) -> str:
        """The SCRIPT of slurm/SCRIPT_CLUSTER.sh, which runs it."""
        language = "roberta" if self.recipe.startswith("roberta") else "gpt2"
        return language if self.task == "language" else self.task


@dataclass(frozen=True)
class Table:
    """Rows with one metric, in the order in which they are shown."""

    title: str
    metric: Metric
    rows: tuple[Row, ...]
    note: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the jobs."""
    paper_ratio: Mapping[tuple[str, int | None], float] = field(default_factory=dict)
    """(method, tau) -> the paper's throughput(128 GPUs) / (8 x throughput(16 GPUs))."""

    @property
    def has_stand_ins(self) -> bool:
        return any(row.local for row in self.rows)


def every_method(task: str, models: Mapping[str, tuple[str, str | None]], **row: Any) -> tuple[Row, ...]:
    """Rows of each model with each method, and with our settings. models: label -> (recipe, stand-in)."""
    rows: list[Row] = []
    for label, (recipe, local) in models.items():
        rows += (Row(label, task, recipe, m, REPORTED.get((recipe, m)), local, **row) for m in METHODS)
        ours = row | {"overrides": row.get("overrides", {}) | RECOMMENDED}
        rows.append(Row(f"{label} (recommended)", task, recipe, "co2", None, local, **ours))
    return tuple(rows)


def without_node_statistics(label: str, recipe: str) -> tuple[Row, ...]:
    """Segmentation with SyncBN over all workers, which only ddp supports, and without SyncBN for each method."""
    over_all = Row(f"{label} with SyncBN over all", "segmentation", recipe, "ddp", None, overrides={"sync_bn": "all"})
    without = {f"{label} without SyncBN": (recipe, None)}
    return over_all, *every_method("segmentation", without, overrides={"sync_bn": "no"})


def throughput(network: str) -> tuple[Row, ...]:
    """Short runs with 4 samples a GPU on 1, 2 and 16 nodes. The paper reports words/s over TCP/IP."""
    methods = [("ddp", None), ("co2", 48), ("co2", 12), ("slowmo", 48), ("overlap_local", 48)]
    known = {("ddp" if tau is None else "co2", tau, nodes): words for (tau, nodes), words in WORDS_PER_SECOND.items()}
    if network != "tcp":
        known = {}
    return tuple(
        Row(
            label=f"{nodes * GPUS} GPUs",
            task="language",
            recipe="gpt2_large_owt",
            method=method,
            paper=(known[method, tau, nodes], None) if (method, tau, nodes) in known else None,
            tau=tau,
            nodes=nodes,
            network=network,
            overrides={"batch_size": 4 * GPUS * nodes, "epochs": 1},
            seeds=(0,),
        )
        for method, tau in methods
        for nodes in (1, 2, 16)
    )


def searched() -> dict[str, Table]:
    """CO2 with the values of tau that the paper searched, on images and on text."""
    tables: dict[str, Table] = {}
    for task, model, metric, recipe, stand_in, row in (
        ("vision", "ResNet-50", TOP1, "imagenet_resnet50", "digits_small", {}),
        ("language", "GPT-2 Small", PERPLEXITY, "gpt2_small_owt", "gpt2_pydoc_small", {"nodes": 8}),
    ):
        local = {tau: stand_in if 10 * tau <= STEPS[task] else None for tau in TAUS}
        rows = (Row(f"tau {tau}", task, recipe, "co2", None, local[tau], tau=tau, **row) for tau in TAUS)
        tables[f"tau_{task}"] = Table(f"Local steps per round: {model}", metric, tuple(rows), TAU_NOTE)
    return tables


def gpt2_small(label: str, method: str, overrides: Mapping[str, Any], perplexity: float | None = None) -> Row:
    """GPT-2 Small with one staleness gap penalty or its replacement. perplexity: the paper's."""
    paper = None if perplexity is None else (perplexity, None)
    recipe, stand_in = "gpt2_small_owt", "gpt2_pydoc_small"
    return Row(label, "language", recipe, method, paper, stand_in, nodes=8, overrides=overrides)


TAU_NOTE = (
    "The paper searched these values of tau. We do not know what it measured for each. A stand-in has 660 steps on "
    "text and 176 on images, and runs where that is 10 rounds or more."
)
NO_GAP = {"co2.gap": "none"}

# The stand-ins' changes of their recipes, by task or script. A run takes seconds to minutes.
SHORT: dict[str, dict[str, Any]] = {
    "vision": {"epochs": 8, "eval_every": 8, "optim.warmup_steps": 10},
    "segmentation": {"epochs": 15, "batch_size": 8, "eval_every": 15},
    "pointcloud": {"epochs": 2, "batch_size": 32, "points": 128, "optim.warmup_steps": 10},
    "language": {
        "epochs": 1, "epoch_steps": 660, "batch_size": 16, "context": 32, "optim.warmup_steps": 10, "optim.lr": 0.001,
    },
}  # fmt: skip
SHORT["roberta"] = SHORT["language"] | {"epochs": 2}  # one token in seven is learned
STEPS = {"vision": 176, "language": 660}  # of digits_small and of text

# -- the tables -------------------------------------------------------------------------------------------------

IMAGENET = {
    "ResNet-50": ("imagenet_resnet50", "digits_small"),
    "ViT-Base": ("imagenet_vit_base", "digits_vit"),
    "Swin-T": ("imagenet_swin_tiny", "digits_swin"),
    "RegNetY-16GF": ("imagenet_regnet", "digits_regnet"),
}
ADE20K = {
    "ResNet-50": ("ade20k_resnet50", "camvid_small"),
    "ResNet-101": ("ade20k_resnet101", None),
    "Swin-T": ("ade20k_swin_tiny", None),
    "Swin-B": ("ade20k_swin_base", None),
    "ViT-B": ("ade20k_vit_base", None),
}
SHAPENET = {
    "autoencoder, folding": ("shapenet_folding", "surfaces_folding"),
    "autoencoder, MLP": ("shapenet_mlp", "surfaces_small"),
}
MASKED = {"masked autoencoder": ("shapenet_mae", "modelnet10_mae_small")}
GPT2 = {
    "GPT-2 Small": ("gpt2_small_owt", "gpt2_pydoc_small"),
    "GPT-2 Medium": ("gpt2_medium_owt", None),
    "GPT-2 Large": ("gpt2_large_owt", None),
    "GPT-2 XL": ("gpt2_xl_owt", None),
}
ROBERTA = {
    "Base": ("roberta_base_wikibooks", "roberta_pydoc_small"),
    "Large": ("roberta_large_wikibooks", None),
    "Base, WikiText-103": ("roberta_base_wikitext103", None),
    "Large, WikiText-103": ("roberta_large_wikitext103", None),
}
TABLES = {
    "imagenet": Table(
        "Image classification on ImageNet-1K",
        TOP1,
        every_method("vision", IMAGENET),
        "The paper: CO2 is 1 to 3 points above Local-SGD and Overlap-Local-SGD.",
    ),
    "ade20k": Table(
        "Segmentation on ADE20K",
        MIOU,
        every_method("segmentation", ADE20K) + without_node_statistics("ResNet-50", "ade20k_resnet50"),
        "SyncBN shares BatchNorm's statistics over the images of a node with every method: 8 GPUs x 2 = 16, as in "
        "mmsegmentation's published runs (8 x 3 on the 3090s). Two kinds of rows differ: with SyncBN over all GPUs "
        "they share 256 (240), and without SyncBN each GPU uses its own 2 (3). We do not know the paper's choice. Only "
        "the first model has a stand-in, without these two kinds of rows, because workers on one machine are one node.",
    ),
    "shapenet": Table("3-D reconstruction on ShapeNet", CHAMFER, every_method("pointcloud", SHAPENET)),
    "shapenet_mae": Table(
        "Masked autoencoder on ShapeNet",
        HIDDEN_CHAMFER,
        every_method("pointcloud", MASKED),
        "The metric is the test loss. The Chamfer distance of whole clouds also counts the visible patches, which a "
        "model can repeat.",
    ),
    "gpt2": Table(
        "GPT-2 on OpenWebText, 64 GPUs",
        PERPLEXITY,
        every_method("language", GPT2, nodes=8),
        "The paper: CO2 is 0.5 to 1.0 below Local-SGD and Overlap-Local-SGD. Sizes are named as by Radford. fairseq, "
        "which the authors used, calls our Medium, Large and XL small, medium and big. We do not know which names the "
        "paper uses. If fairseq's, its numbers for Small belong to Medium. Only Small has a stand-in. We infer from "
        "2^2.88 = 7.36 that its perplexities may have another base than e, or another unit than GPT-2's tokens, which "
        "we use. So the numbers may not compare.",
    ),
    "transnormer": Table(
        "TransNormer-LLM",
        PERPLEXITY,
        every_method("language", {"7B": ("transnormer_7b_owt", "transnormer_pydoc_small")}),
        "We do not know the paper's text for this model, and perplexities of different texts do not compare.",
    ),
    "roberta": Table("RoBERTa", PERPLEXITY, every_method("language", ROBERTA), "One row has a stand-in."),
    "gap": Table(
        "The staleness gap penalty: GPT-2 Small",
        PERPLEXITY,
        (
            gpt2_small("without", "co2", {**NO_GAP, "co2.allow_unstable": True}, GAP_PERPLEXITY["without"]),
            gpt2_small("with", "co2", {}, GAP_PERPLEXITY["with"]),
        ),
        "We do not know the paper's definition of the penalty; ours is `elementwise`. Without the penalty, these "
        "settings are at the limit of stability on the stand-in and beyond it on 64 GPUs, so they need "
        "`allow_unstable`.",
    ),
    **searched(),
    "throughput": Table(
        "Throughput over 80 Gbps TCP/IP",
        TOKENS,
        throughput("tcp"),
        "The paper's numbers are words/s of a model that we do not know. Ours is GPT-2 Large, so compare only ratios. "
        "The first tenth of a run's steps does not count. The paper's reviewers asked for SlowMo and Overlap-Local-SGD."
        " No stand-in trains over several nodes.",
        env={"NCCL_IB_DISABLE": "1"},
        paper_ratio=SCALING_RATIO,
    ),
    "throughput_roce": Table(
        "Throughput over 800 Gbps RoCE",
        TOKENS,
        throughput("roce"),
        "GPT-2 Large, as in the table above, and no stand-in. We do not know the paper's numbers on this network.",
    ),
}
