"""Inner optimizers, learning-rate schedules and the backward pass, the same for every task and every method."""

import contextlib
import difflib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from core.errors import UserError
from training.start.errors import explained

OWN = ("sgd", "adamw", "adam", "muon")
LARGE = 1e4  # above any sensible learning rate, norm or decay


@dataclass(frozen=True)
class OptimConfig:
    """The inner optimizer, which every worker runs by itself, and its learning-rate schedule over the whole run."""

    name: str = "sgd"
    """The optimizer: sgd, adamw, adam, muon, or any of timm's, such as lamb or lion. muon is torch.optim.Muon for
    matrices in a language model's blocks, with AdamW for all others."""
    lr: float = 0.1
    """Peak learning rate."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Use Nesterov momentum with SGD."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam and AdamW."""
    eps: float = 1e-8
    """Epsilon of Adam and AdamW."""
    weight_decay: float = 0.0
    """Weight decay, for all parameters that `undecayed` does not exclude."""
    undecayed: tuple[str, ...] | None = None
    """Exclude parameters from weight decay if their names contain one of these texts. An empty list decays all
    parameters. None is timm's rule, which excludes biases, normalization weights and other vectors, and the names in
    the model's no_weight_decay(), such as position embeddings. In language models None decays only matrices of linear
    layers."""
    layer_decay: float | None = None
    """Multiply the learning rate by this number for each layer below the last, as timm does. None: equal rates."""
    schedule: Literal["cosine", "poly", "inverse_sqrt", "constant"] = "cosine"
    """Learning-rate schedule after the warm-up."""
    power: float = 1.0
    """Exponent of the poly schedule. 0.9 is usual for SGD, 1.0 (linear) for AdamW."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    min_lr_share: float = 0.0
    """Final learning rate of cosine and poly, as a share of the peak."""
    clip_grad_norm: float | None = None
    """Clip each worker's gradient to this norm. None means no clipping."""

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise UserError(f"optim {name}={getattr(self, name)}: give {remedy}")

        require(0 < self.lr < LARGE, "lr", f"a learning rate above 0 and below {LARGE:g}")
        require(0 <= self.momentum < 1, "momentum", "a number in [0, 1)")
        require(all(0 <= beta < 1 for beta in self.betas), "betas", "numbers in [0, 1)")
        require(0 < self.eps < LARGE, "eps", "a small number above 0")
        require(0 <= self.weight_decay < LARGE, "weight_decay", f"0 or more, below {LARGE:g}")
        require(self.layer_decay is None or 0 < self.layer_decay <= 1, "layer_decay", "a number above 0 and up to 1")
        require(0 < self.power < LARGE, "power", "a number above 0")
        require(self.warmup_steps >= 0, "warmup_steps", "0 or more")
        require(0 <= self.min_lr_share <= 1, "min_lr_share", "a share, from 0 to 1")
        clip, momentum = self.clip_grad_norm, self.name != "sgd" or self.momentum > 0
        require(clip is None or 0 < clip < LARGE, "clip_grad_norm", "a number above 0, or None")
        require(not self.nesterov or momentum, "nesterov", "a momentum above 0 with it")


def make_optimizer(
    model: nn.Module, config: OptimConfig, groups: list[dict[str, Any]] | None = None
) -> torch.optim.Optimizer:
    """Returns the optimizer of the trainable parameters.

    `groups` are parameter groups in torch's form, where "muon": True marks groups for Muon. The default is two groups,
    with and without weight decay.
    """
    if config.layer_decay is not None:
        groups = layer_groups(model, config)
    groups = [g for g in groups or decay_groups(model, config) if g["params"]]
    if config.name not in OWN:
        return of_timm(groups, config)
    on_gpu = all(p.is_cuda for g in groups for p in g["params"])
    fused = {"fused": True} if on_gpu else {}  # one kernel for all parameters, with the same result up to rounding
    if config.name == "sgd":
        return torch.optim.SGD(groups, config.lr, momentum=config.momentum, nesterov=config.nesterov, **fused)
    if config.name == "muon":
        return MuonAdamW(groups, config.lr, betas=config.betas, eps=config.eps, **fused)
    cls = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
    return cls(groups, config.lr, betas=config.betas, eps=config.eps, **fused)


def of_timm(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    """Returns timm's optimizer of that name, with betas and eps only if they are not the defaults here."""
    optim = _timm_optim()
    if config.name not in (known := optim.list_optimizers()):
        near = ", ".join(difflib.get_close_matches(config.name, [*OWN, *known], n=3)) or ", ".join(OWN)
        raise UserError(f"optim name={config.name!r}: neither ours nor timm's; did you mean {near}?")
    given = {key: value for key in ("betas", "eps") if (value := getattr(config, key)) != getattr(OptimConfig, key)}
    with explained(f"optim name={config.name!r}: cannot be made", "give another"):  # some need a package, or a GPU
        if optim.get_optimizer_info(config.name).second_order:
            raise ValueError("it needs gradients of gradients")
        return optim.create_optimizer_v2(groups, config.name, config.lr, momentum=config.momentum, **given)


def layer_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Returns timm's groups for layer_decay, each with its peak learning rate."""
    named = config.undecayed is not None
    spared = [f"*{part}*" for part in config.undecayed or ()] if named else getattr(model, "no_weight_decay", set)()
    how = {"no_weight_decay_list": spared, "weight_decay_exclude_1d": not named, "layer_decay": config.layer_decay}
    groups = _timm_optim().param_groups_layer_decay(model, config.weight_decay, **how)
    return [{k: g[k] for k in ("params", "weight_decay")} | {"lr": config.lr * g["lr_scale"]} for g in groups]


def _timm_optim() -> Any:
    """Returns timm.optim. It is imported on first use, because timm takes seconds to import."""
    import training.prepared  # noqa: F401

    # isort: split
    import timm.optim

    return timm.optim


class MuonAdamW(torch.optim.Optimizer):
    """torch.optim.Muon for parameter groups with "muon": True, and torch.optim.AdamW for all others, as one optimizer.

    Both use the same learning rate. Muon scales its own to the size of AdamW's steps (adjust_lr_fn="match_rms_adamw").
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, **adamw: Any):
        muon, others = ([g for g in groups if bool(g.get("muon")) == wanted] for wanted in (True, False))
        if not muon:
            raise UserError("optim name=muon: only language models mark the matrices for Muon; give adamw")
        own: list[torch.optim.Optimizer] = [torch.optim.Muon(muon, lr, adjust_lr_fn="match_rms_adamw")]
        self.parts = own + ([torch.optim.AdamW(others, lr, **adamw)] if others else [])
        super().__init__([g for part in self.parts for g in part.param_groups], {"lr": lr})
        self._share()

    def _share(self) -> None:
        for part in self.parts:
            part.param_groups = [g for g in self.param_groups if ("ns_steps" in g) == (part is self.parts[0])]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for part in self.parts:
            part.step()


def decay_groups(
    model: nn.Module, config: OptimConfig, usual: Callable[[str, Tensor], bool] | None = None
) -> list[dict[str, Any]]:
    """Returns the trainable parameters in two groups, with and without weight decay.

    `usual` says whether a parameter decays if undecayed is None. The default is timm's rule.
    """
    spared = getattr(model, "no_weight_decay", set)()

    def decays(name: str, p: Tensor) -> bool:
        if config.undecayed is not None:
            return not any(part in name for part in config.undecayed)
        if usual is not None:
            return usual(name, p)
        return p.ndim >= 2 and not any(fnmatch(name, pattern) for pattern in spared)

    trainable = [(p, decays(name, p)) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for p, decayed in trainable if decayed == wanted], "weight_decay": weight_decay}
        for wanted, weight_decay in ((True, config.weight_decay), (False, 0.0))
    ]


def clip_gradients(model: nn.Module, config: OptimConfig) -> None:
    """Clips the norm of this worker's gradient if the recipe says so. A model under a layout clips in its own way."""
    if config.clip_grad_norm is None:
        return
    if clip := getattr(model, "clip_gradients", None):
        clip(config.clip_grad_norm)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm)


def lr_factor(step: int, total_steps: int, config: OptimConfig) -> float:
    """Returns the learning rate of a step, counted from 0, as a share of the peak."""
    warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse_sqrt":  # as in Vaswani et al. 2017, scaled to peak at the end of the warm-up
        return math.sqrt(max(1, warmup) / max(1, step + 1))
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.schedule == "poly":
        left = (1 - progress) ** config.power
    else:
        left = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_share + (1 - config.min_lr_share) * left


def make_schedule(optimizer: torch.optim.Optimizer, total_steps: int, config: OptimConfig) -> LambdaLR:
    """Returns the schedule as a torch scheduler. Call its step() after every optimizer step."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, total_steps, config))


# -- the forward and the backward pass --------------------------------------------------------------------------------


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts every module into eval mode for a block, and back into its own mode."""
    training = [m for m in model.modules() if m.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


Scalars = dict[str, Tensor]


def backward_in_parts(
    wrapped: nn.Module,
    parts: Sequence[Any],
    part_of: Callable[[Any], Scalars],
    scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Scalars:
    """Computes the gradient of the loss over all parts of this worker's batch. `scaled` scales each loss for it.

    `part_of` runs the forward pass of a part and returns 0-d scalars, with a "train_loss". Each is weighted by the
    part's share of the batch, so that the sums are averages over the batch.

    Returns:
        The scalars, summed over the parts.
    """
    sums: Scalars = {}
    for number, part in enumerate(parts, start=1):
        waits = hasattr(wrapped, "no_sync") and number < len(parts)  # DDP reduces once, in the last backward pass
        with wrapped.no_sync() if waits else contextlib.nullcontext():
            scalars = part_of(part)
            scaled(scalars["train_loss"]).backward()
        for name, value in scalars.items():
            sums[name] = sums[name] + value.detach() if name in sums else value.detach()
    return sums


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Makes each block keep only its input, and compute all else again in the backward pass."""
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        count_once(block)


def count_once(model: nn.Module) -> None:
    """Makes running statistics, such as BatchNorm's, ignore a forward pass that a backward pass computes again.

    torch.utils.checkpoint, on which timm's and mmseg's own recomputing rely, would update them twice a step.
    """
    for module in model.modules():
        if any(name.startswith("running_") and t is not None for name, t in module._buffers.items()):
            module.register_forward_pre_hook(_lend_copies)
            module.register_forward_hook(_take_back, always_call=True)  # recomputing stops early by an exception


def _lend_copies(module: nn.Module, _: Any) -> None:
    """Replaces the statistics by copies in a backward pass, where torch has a graph task."""
    if torch.compiler.is_compiling() or "_lent" in module.__dict__:  # lent already, if a model was prepared twice
        return
    if torch._C._current_graph_task_id() != -1:
        module.__dict__["_lent"] = dict(module._buffers)
        module._buffers.update({name: t if t is None else t.clone() for name, t in module._buffers.items()})


def _take_back(module: nn.Module, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        module._buffers.update(module.__dict__.pop("_lent", {}))
