"""What needs two workers: CO2Hook in real mmengine runners, as in somebody else's mmseg project; SyncBN in a node."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor, nn

from core import CO2Config, UserError
from core.integrations.mmengine import CO2Hook
from core.testing import run_distributed
from segmentation.model import upernet
from tests.domains.sync_bn_on_cpu import be_in_a_node, one_pass

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
        self.built, self.wrapped = hook.method, hasattr(runner.model, "module")


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
    for method, extra in (("slowmo", {"outer_momentum": 0.3}), ("overlap_local", {"pull": 0.4})):
        probe = Probe()
        loop = {"type": "IterBasedTrainLoop", "max_iters": 3}
        model = runner(method, folder, probe, {"method": method, "tau": 2, method: extra}, train_cfg=loop).train()
        results[method] = {"seen": probe.seen, "end": flat(model), "config": probe.built.config}
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
    for name in ("co2", "slowmo", "overlap_local"):
        a, b = (r[name]["end"] for r in two)
        assert torch.equal(a, b), name
        assert not torch.equal(a, two[0][name]["seen"][0]), name
    assert torch.equal(two[0]["co2"]["buffers"], two[1]["co2"]["buffers"])


def test_settings_arrive_and_a_resumed_run_ends_as_the_whole_one(two: list[dict[str, Any]]):
    expected = CO2Config(tau=3, outer_lr=0.5, outer_momentum=0.25, gap="norm", clip=0.5)
    assert two[0]["co2"]["config"] == expected and two[0]["slowmo"]["config"].outer_momentum == 0.3
    assert two[0]["overlap_local"]["config"].pull == 0.4
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
        "wire has no setting 'bits'": {"co2": {"wire": {"bits": 8}}},
        "co2.wire='int8': give a dict": {"co2": {"wire": "int8"}},
        "tau=0": {"tau": 0},
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
