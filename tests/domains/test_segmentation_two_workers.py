"""What needs two workers: CO2Hook in mmengine runners, as in somebody else's mmseg project; SyncBN inside a node."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel

from core import CO2Config, UserError
from core.baselines.ddp import DDP
from core.integrations.mmengine import CO2Hook
from core.testing import run_distributed
from segmentation import model
from segmentation import model as built
from segmentation.model import upernet
from segmentation.recipes import RECIPES, digits_small
from segmentation.train import make_model
from tests.scripts import Mistakes
from training.loop.run import Run

LIBRARY = ["distutils.errors"]  # which each of mmengine's runners asks for

# -- a node of two workers whose CPU has SyncBatchNorm: stand-ins for five kernels of ATen's --------------------------


def column(t: Tensor) -> Tensor:
    return t.view(1, -1, 1, 1)


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(mean, 1 / standard deviation)."""
    return x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + eps).rsqrt()


def gather_stats(
    _: Tensor, mean: Tensor, invstd: Tensor, running: Tensor, var: Tensor, momentum: float, eps: float, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Those of all workers' images; moves the running mean and variance."""
    n = counts.sum()
    share = (counts / n)[:, None]
    overall = (share * mean).sum(0)
    spread = (share * (invstd**-2 - eps + (mean - overall) ** 2)).sum(0)
    running.lerp_(overall, momentum)
    var.lerp_(spread * n / (n - 1), momentum)
    return overall, (spread + eps).rsqrt()


def normalise(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, _: float) -> Tensor:
    return (x - column(mean)) * column(invstd * weight) + column(bias)


def reduce(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, *_: Any) -> tuple[Tensor, ...]:
    total, by_x = dy.sum((0, 2, 3)), (dy * (x - column(mean))).sum((0, 2, 3))
    return total, by_x, by_x * invstd, total.clone()


def slope(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, total: Tensor, by_x: Tensor, count: Tensor
) -> Tensor:
    n = count.sum()
    return (dy - column(total / n) - (x - column(mean)) * column(invstd**2 * by_x / n)) * column(invstd * weight)


KERNELS = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": normalise,
    "batch_norm_backward_reduce": reduce,
    "batch_norm_backward_elemt": slope,
}


def be_in_a_node(rank: int, world_size: int) -> torch.library.Library:
    """This process is one of a node's two workers, whose CPU has the kernels; torch and the script let it use them."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "2"}
    library = torch.library.Library("aten", "IMPL", "CPU")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel)
    allowing = SimpleNamespace(**vars(torch._C) | {"_get_privateuse1_backend_name": lambda: "cpu"})
    mock.patch.object(batchnorm, "torch", SimpleNamespace(**vars(torch) | {"_C": allowing})).start()
    mock.patch.object(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None).start()
    mock.patch.object(built, "DEVICES", ("cpu",)).start()
    return library


def of_two_images(**changes: Any) -> Any:
    """A recipe that gives each of four workers two images a step."""
    return replace(digits_small(), **{"device": "cpu", "batch_size": 8, "co2": CO2Config(tau=3)} | changes)


def one_pass(rank: int, settings: dict) -> dict[str, Any]:
    """A forward and backward pass on this worker's images, beside plain BatchNorm on all that it shares with."""
    recipe = of_two_images(**settings)
    with Run(recipe) as run:
        model = run.shard(make_model(recipe))
        _, method = run.make_method(model, torch.optim.SGD(model.parameters(), lr=0.1))
        built.share_statistics(run, model, method)
        layers = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
        (group,) = {layer.process_group for layer in layers}
        members = dist.get_process_group_ranks(group)
        plain = make_model(replace(recipe, sync_bn="no"))
        plain.load_state_dict(model.state_dict())
        images = [torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(r)) for r in members]
        for network, given in ((model, images[members.index(rank)]), (plain, torch.cat(images))):
            network.train().backbone(given)[-1].square().sum().backward()
        errors = []
        for ours, theirs in zip(model.backbone.parameters(), plain.backbone.parameters(), strict=True):
            dist.all_reduce(ours.grad, group=group)  # of the workers' summed losses
            errors.append(float((ours.grad - theirs.grad).norm() / theirs.grad.norm()))
        for ours, theirs in zip(model.backbone.buffers(), plain.backbone.buffers(), strict=True):
            errors.append(float((ours - theirs).float().norm() / theirs.float().norm()))
        of_gradients = method.group if isinstance(method, DDP) else run.mesh and run.mesh.get_group("shard")
        method.finish()
        method.close()
    return {"members": members, "layers": len(layers), "error": max(errors), "same group": group is of_gradients}


# -- CO2Hook in mmengine's runners ------------------------------------------------------------------------------------


# mmengine's default wrapper asks for a GPU
DDP_ON_CPU = {"type": "MMDistributedDataParallel", "device_ids": None, "broadcast_buffers": False}


class Probe(Hook):
    """Notes the parameters behind every iteration, when all other hooks have run, and the method that was built."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.built: Any = None
        self.wrapped = True

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        self.seen.append(flat(runner.model))
        (hook,) = (h for h in runner.hooks if isinstance(h, CO2Hook))
        self.built, self.wrapped = hook.co2, hasattr(runner.model, "module")


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def runner(name: str, folder: str, probe: Probe, hook: dict[str, Any], **changes: Any) -> Runner:
    """UPerNet on the embedded digits without random transforms or dropout, so that runs can be compared."""
    model = upernet("resnet_mini", 11, (48, 48))
    for part in ("decode_head", "auxiliary_head"):
        model[part] |= {"dropout_ratio": 0.0}
    dataset = {"type": "DigitsOnPhotos", "split": "val", "pipeline": [{"type": "PackSegInputs"}], "indices": 24}
    loader = {"batch_size": 2, "dataset": dataset, "num_workers": 0}
    config: dict[str, Any] = {
        "model": model,
        "work_dir": f"{folder}/{name}",
        "train_dataloader": loader | {"sampler": {"type": "InfiniteSampler", "shuffle": True}},
        "train_cfg": {"type": "IterBasedTrainLoop", "max_iters": 8},
        "optim_wrapper": {"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 0.05}},
        "default_hooks": {"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 4}},
        "custom_hooks": [{"type": "CO2Hook"} | hook, probe],
        "cfg": {"model_wrapper_cfg": DDP_ON_CPU},
        "default_scope": "mmseg",
        "launcher": "pytorch",
        "randomness": {"seed": 0},
        "experiment_name": f"{name}-{os.getpid()}",
        "log_level": "ERROR",
    }
    return Runner(**(config | changes))


# passes of segmentation's own loop
PASSES = ({"sync_bn": "node"}, {"sync_bn": "all", "method": "ddp"})


def scenarios(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """All that needs two processes; each result is what the tests below look at."""
    os.environ["LOCAL_RANK"] = str(rank)
    results: dict[str, Any] = {}
    co2 = {"tau": 3, "co2": {"outer_lr": 0.5, "outer_momentum": 0.25, "gap": "norm", "clip": 0.5}}
    probe = Probe()
    model = runner("co2", folder, probe, co2).train()
    results["co2"] = {"seen": probe.seen, "end": flat(model), "config": probe.built.config, "wrapped": probe.wrapped}
    results["co2"]["buffers"] = torch.cat([b.flatten().double() for b in model.buffers()])
    again = runner("again", folder, Probe(), co2, load_from=f"{folder}/co2/iter_4.pth", resume=True).train()
    results["resumed"] = flat(again)
    probe, slowmo = Probe(), {"method": "slowmo", "tau": 2, "slowmo": {"outer_momentum": 0.3}}
    loop = {"type": "IterBasedTrainLoop", "max_iters": 3}
    model = runner("slowmo", folder, probe, slowmo, train_cfg=loop).train()
    results["slowmo"] = {"seen": probe.seen, "end": flat(model), "config": probe.built.config}
    kernels = be_in_a_node(rank, world_size)
    results["sync_bn"] = [one_pass(rank, {"out": Path(folder, str(i))} | settings) for i, settings in enumerate(PASSES)]
    del kernels
    return results


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("hook"))
    return run_distributed(scenarios, 2, folder, timeout=240.0)


def test_workers_train_apart_meet_at_round_ends_and_end_equal(two: list[dict[str, Any]]):
    first, second = (r["co2"]["seen"] for r in two)
    equal = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    # rounds end at 3 and, counted anew after the checkpoint at 4, at 7; 4 and 8 are checkpoints
    assert equal == [False, False, True, True, False, False, True, True] and not two[0]["co2"]["wrapped"]
    for name in ("co2", "slowmo"):
        a, b = (r[name]["end"] for r in two)
        assert torch.equal(a, b), name
        assert not torch.equal(a, two[0][name]["seen"][0]), name
    assert torch.equal(two[0]["co2"]["buffers"], two[1]["co2"]["buffers"])


def test_settings_arrive_and_a_resumed_run_ends_as_the_whole_one(two: list[dict[str, Any]]):
    expected = CO2Config(tau=3, outer_lr=0.5, outer_momentum=0.25, gap="norm", clip=0.5)
    assert two[0]["co2"]["config"] == expected and two[0]["slowmo"]["config"].outer_momentum == 0.3
    for result in two:
        torch.testing.assert_close(result["resumed"], result["co2"]["end"], rtol=0, atol=1e-6)
        assert not torch.allclose(result["resumed"], result["co2"]["seen"][3], rtol=0, atol=1e-6)


def test_the_checkpoint_holds_the_outer_state(tmp_path: Path) -> None:
    """One process, no process group: the hook works there too, and its checkpoint resumes only its own method."""
    single = {"launcher": "none", "cfg": {}, "train_cfg": {"type": "IterBasedTrainLoop", "max_iters": 4}}
    runner("one", str(tmp_path), Probe(), {"tau": 2}, **single).train()
    path = tmp_path / "one" / "iter_4.pth"
    saved = torch.load(path, weights_only=False)["co2"]
    assert saved["name"] == "co2" and saved["state"]["rank0"]["rounds"] >= 2
    resume = single | {"load_from": str(path), "resume": True}
    with pytest.raises(UserError, match="trained with co2, not local"):
        runner("other", str(tmp_path), Probe(), {"method": "local", "tau": 2}, **resume).train()
    fine_tune = single | {"load_from": str(path)}
    runner("tuned", str(tmp_path), Probe(), {"method": "local", "tau": 2}, **fine_tune).train()


def test_mistakes_get_one_line() -> None:
    mistakes: dict[str, dict[str, Any]] = {
        "method='ddp': choose co2": {"method": "ddp"},
        "co2 has no setting 'outer_rl': it has .*outer_lr, outer_momentum": {"co2": {"outer_rl": 1.0}},
        "slowmo has no setting 'clip': it has outer_lr, outer": {"method": "slowmo", "slowmo": {"clip": 1.0}},
        "compression has no setting 'bits'": {"co2": {"compression": {"bits": 8}}},
        "co2.compression='int8': give a dict": {"co2": {"compression": "int8"}},
        "tau=0": {"tau": 0},
        "mesh=: the model is bare here": {"mesh": object()},
    }
    for message, settings in mistakes.items():
        with pytest.raises(UserError, match=message):
            CO2Hook(**settings)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4))
    with pytest.raises(UserError, match="1 is SyncBatchNorm"):
        CO2Hook().before_run(SimpleNamespace(model=model))  # type: ignore[arg-type]


def test_a_nodes_workers_share_statistics(two: list[dict[str, Any]]) -> None:
    """Those, and gradients, of all images that are shared; over the gradients' own group where it is the same."""
    for result in two:
        assert [(f["members"], f["same group"]) for f in result["sync_bn"]] == [([0, 1], False), ([0, 1], True)]
        assert all(f["layers"] > 20 and f["error"] < 1e-3 for f in result["sync_bn"])


# -- what is refused, and what is built ---------------------------------------------------------------------------


def test_a_run_that_cannot_share_statistics_is_refused(tmp_path: Path, mistake: Mistakes) -> None:
    out = ("--out", str(tmp_path / "run"), "--device", "cpu", "--batch_size", "4")
    text = mistake("segmentation.train", "digits_small", "--no_recommended", "--sync_bn", "node", *out)
    assert "error: sync_bn='node' needs GPUs, torch has no SyncBatchNorm for a CPU: give --sync_bn no" in text
    with mock.patch.object(model, "DEVICES", ("cpu",)):
        text = mistake("segmentation.train", "digits_small", "--no_recommended", "--sync_bn", "node", *out)
    assert "error: sync_bn='node' with 1 worker a node shares nothing: give --sync_bn no" in text


@pytest.mark.parametrize(("setting", "kind"), [("no", "BatchNorm2d"), ("node", "SyncBatchNorm")])
def test_the_layers_are_what_the_recipe_says(setting: Any, kind: str) -> None:
    recipe = replace(RECIPES["ade20k_resnet50"], sync_bn=setting)
    with torch.device("meta"):
        assert {type(m).__name__ for m in make_model(recipe).modules() if "BatchNorm" in type(m).__name__} == {kind}
