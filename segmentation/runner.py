"""Runs a config file of mmsegmentation under any method:

    torchrun --standalone --nproc-per-node 4 -m segmentation.train --config FILE.py [options]

Models, data, schedule, hooks and metrics are the config's own. CO2Hook replaces the gradient average. --dry_run prints
the resolved config and the model's size, and says what data are missing.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import segmentation.registries  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from mmengine.config import Config, DictAction
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmseg.registry import DATASETS

import core.integrations.mmengine  # noqa: F401, registers CO2Hook
from core.checkpoint.stored import reason
from core.errors import UserError
from segmentation.model import BASES, SCHEME, build_model
from training.data.files import data_root
from training.optim import count_once
from training.start.errors import explained
from training.start.script import parse_options
from training.start.workers import join, pick_device, rank, world_size
from training.weights.read import classes_of, misnamed

CONFIGS = BASES.parents[1]  # of the installed mmsegmentation
ON_CPU = {"type": "MMDistributedDataParallel", "device_ids": None, "broadcast_buffers": False}


@dataclass(frozen=True)
class ConfigOptions:
    """Trains a config file of mmsegmentation."""

    config: Path
    """The file, or a name in the configs of the installed mmsegmentation, such as upernet/upernet_r50_....py."""
    method: Literal["co2", "ddp", "diloco", "local", "overlap_local", "slowmo"] = "co2"
    """Training method."""
    tau: int | None = None
    """Local steps per round. The default is CO2Config.recommended's for co2, and 48 for other methods."""
    sync_bn: Literal["convert", "node", "all"] = "convert"
    """SyncBN becomes BatchNorm (convert), or shares statistics in a node, or with ddp over all workers (GPUs only)."""
    out: Path | None = None
    """mmengine's work_dir. The default is the config's own, or runs/NAME-METHOD."""
    resume: bool = False
    """Continue from the last checkpoint in the work_dir."""
    test: Path | None = None
    """Test this checkpoint of mmseg instead of training."""
    tta: bool = False
    """Average the predictions of a test over the config's tta_pipeline, such as an image and its mirror image."""
    set: tuple[str, ...] = ()
    """Changes to the config, KEY=VALUE as in mmsegmentation's --cfg-options."""
    dry_run: bool = False
    """Print the resolved config and the number of parameters, and check the data. Nothing is trained."""
    timeout: float = 600.0
    """Seconds until a missing worker is an error."""

    def __post_init__(self) -> None:
        if self.sync_bn == "all" and self.method != "ddp":
            raise UserError(f"sync_bn='all' does not go with method={self.method!r}: give --sync_bn node or convert")
        if self.sync_bn == "node" and self.method == "ddp":
            raise UserError("sync_bn='node' does not go with method='ddp': give --sync_bn all or convert")


def train_config() -> None:
    """Runs the command: segmentation.train --config FILE.py."""
    given = parse_options(ConfigOptions, prog="segmentation.train", use_underscores=True)
    config = read(given.config)
    for change in given.set:
        key, _, value = change.partition("=")
        config.merge_from_dict({key: DictAction._parse_iterable(value)})
    config.work_dir = str(given.out or config.get("work_dir") or f"runs/{given.config.stem}-{given.method}")
    config.resume = given.resume
    if given.tta:
        if given.test is None or "tta_pipeline" not in config:
            raise UserError("tta needs --test CHECKPOINT, and a config with a tta_pipeline: leave it out")
        config.test_dataloader.dataset.pipeline = config.tta_pipeline
        config.model = {**config.get("tta_model", {"type": "SegTTAModel"}), "module": config.model}
    if given.test is not None:
        config.load_from = str(given.test)
    elif any("CO2Hook" in str(hook.get("type")) for hook in config.get("custom_hooks") or ()):
        remedy = "remove it from custom_hooks, or train with mmsegmentation's own tools/train.py"
        raise UserError(f"config={given.config}: has a CO2Hook, and --method {given.method} chooses here: {remedy}")
    elif given.method != "ddp":
        hook: dict[str, Any] = {"type": "CO2Hook", "method": given.method, "tau": given.tau, "timeout": given.timeout}
        hook["sync_bn"] = "node" if given.sync_bn == "node" else "convert"
        config.custom_hooks = [*config.get("custom_hooks", []), hook]
    # before mmengine wraps the model in DDP, which refuses SyncBN on a CPU
    if given.sync_bn == "convert" or given.test is not None:
        changed(config.model, lambda key, value: "BN" if (key, value) == ("type", "SyncBN") else value)
    if given.dry_run:
        return dry_run(config, given)
    check_data(config, given)
    device = pick_device("auto")
    made = join(device, given.timeout, {key: str(value) for key, value in vars(given).items()})
    config.launcher = "pytorch" if dist.is_initialized() else "none"
    if device.type == "cpu":
        config.model_wrapper_cfg = ON_CPU
    runner = Runner.from_cfg(config)
    runner.register_hook(ClassOrder(given))
    count_once(runner.model)  # a config may recompute by with_cp or activation_checkpointing
    try:
        runner.test() if given.test is not None else runner.train()
    except FileNotFoundError as error:
        raise missing(given, error) from None
    if made and dist.is_initialized():
        dist.destroy_process_group()


def dry_run(config: Config, given: ConfigOptions) -> None:
    """Prints the config and the model's size, without allocating the model. Missing data are a warning."""
    with torch.device("meta"):
        model = build_model(config.model)
    if rank() > 0:
        return
    print(config.pretty_text)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{millions:.2f} M parameters, {world_size()} workers, {given.method}, {config.work_dir}")
    try:
        check_data(config, given)
    except UserError as error:
        print(f"warning: {error}", file=sys.stderr)


def check_data(config: Config, given: ConfigOptions) -> None:
    """Refuses missing data, and classes of another order than in training, before mmengine writes a log."""
    trained = list[str]()
    for split in ("train", "val") if given.test is None else ("test",):
        loader = config.get(f"{split}_dataloader")
        if loader is None:
            continue
        try:
            dataset = DATASETS.build(copy.deepcopy(loader.dataset))
            mask = dataset.get_data_info(0).get("seg_map_path") if given.test is None else None
            if mask and "://" not in mask and not Path(mask).exists():
                raise FileNotFoundError(mask)
        except (FileNotFoundError, AssertionError) as error:  # mmseg asserts that a list of images is there
            raise missing(given, error) from None
        except (IndexError, ValueError) as error:
            if isinstance(error, ValueError) and "at least one array" not in str(error):  # a list of no images, packed
                raise
            raise missing(given, FileNotFoundError(f"an image of {split}_dataloader")) from None
        found = list(getattr(dataset, "metainfo", {}).get("classes") or ())
        trained = trained or found
        wrong = misnamed(trained, found, ("in train_dataloader", f"in {split}_dataloader"))
        if len(found) != len(trained):
            wrong = f"{len(trained)} classes in train_dataloader, {len(found)} in {split}_dataloader"
        if wrong:
            raise UserError(f"config={given.config}: {wrong}: give both data sets the same classes, in one order")


def missing(given: ConfigOptions, error: Exception) -> UserError:
    """Returns mmseg's error for missing data in one line."""
    what = getattr(error, "filename", None) or reason(error)
    remedy = "set CO2_DATA to the folder with the config's data, or --set the config's own paths"
    return UserError(f"config={given.config}: {what} is missing: {remedy}")


class ClassOrder(Hook):
    """Refuses a checkpoint whose classes have another order than the data's, for a test or when training resumes."""

    def __init__(self, given: ConfigOptions):
        self.given = given

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        testing = self.given.test is not None
        if not testing and not self.given.resume:
            return  # its head may be of another task
        dataset: Any = (runner.test_dataloader if testing else runner.train_dataloader).dataset
        if wrong := misnamed(classes_of(checkpoint), dataset.metainfo.get("classes") or ()):
            given = f"test={self.given.test}" if testing else f"resume=True, work_dir={runner.work_dir}"
            raise UserError(f"{given}: was trained with other data, {wrong}: give that data")


def read(path: Path) -> Config:
    """Returns the config, with local files in CO2_DATA for data sets and weights that it names elsewhere."""
    found = path if path.is_file() else CONFIGS / path
    if not found.is_file():
        near = [str(f.relative_to(CONFIGS)) for f in sorted(CONFIGS.rglob(f"*{path.stem}*.py"))[:3]]
        hint = f"did you mean {', '.join(near)}?" if near else "give another"
        raise UserError(f"config={path}: no such file, neither here nor in {CONFIGS}: {hint}")
    with explained(f"config={path}: cannot be read", "mend it, or give another"):  # it is a Python program
        config = Config.fromfile(found)

    def local(key: str, value: Any) -> Any:
        if key == "data_root" and isinstance(value, str) and value.startswith("data/") and not Path(value).exists():
            return str(data_root() / value.removeprefix("data/"))
        if key in ("checkpoint", "pretrained") and isinstance(value, str) and not Path(value).exists():
            name = value.rpartition("/")[2]
            wanted = re.compile(re.escape(name) + r"((-[0-9a-f]{8,64})?\.pth?)?")  # URLs may lack the hash
            files = [path for path in sorted((data_root() / "backbones").glob("*")) if wanted.fullmatch(path.name)]
            if len(files) > 1:
                both = " and ".join(path.name for path in files)
                raise UserError(f"{key}={value}: {files[0].parent} holds {both}: keep one, or give a file's full path")
            return f"{SCHEME}{files[0].absolute()}" if files else value
        return value

    changed(config, local)
    return config


def changed(part: Any, change: Callable[[str, Any], Any]) -> None:
    """Replaces the values of a config in place, at any depth."""
    for key in range(len(part)) if isinstance(part, list) else [*part]:
        if isinstance(part[key], dict | list):
            changed(part[key], change)
        elif isinstance(part, dict):
            part[key] = change(key, part[key])
