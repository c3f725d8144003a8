"""Weights of other runs and libraries: their names, what wrappers add to them, and the order of their outputs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from core import UserError
from tests.scripts import refused
from training.weights.read import NAMES, keep_names, load_weights


class Net(nn.Module):
    """A model with BatchNorm and a head of three classes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 3)


def prefixed(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: t for name, t in weights.items()}


def averaged(model: nn.Module) -> dict[str, Tensor]:
    average = AveragedModel(model)
    average.update_parameters(model)
    return dict(average.state_dict())


@pytest.fixture
def net() -> Net:
    net = Net()
    net.body(torch.randn(8, 2))
    return net


FILES: dict[str, Any] = {
    "an older library's, without counters": lambda w, _: {k: t for k, t in w.items() if "num_batches" not in k},
    "AveragedModel's": lambda _, net: averaged(net),
    "AveragedModel's of a compiled DDP model": lambda w, _: (
        prefixed("module._orig_mod.module.", w) | {"n_averaged": torch.tensor(3)}
    ),
    "mmengine's average": lambda w, _: {"ema_state_dict": prefixed("module.", w) | {"steps": torch.tensor(3)}},
    "compile of DDP": lambda w, _: prefixed("_orig_mod.module.", w),
    "DDP of compile": lambda w, _: prefixed("module._orig_mod.", w),
    "Lightning's": lambda w, _: {"state_dict": prefixed("model.", w), "epoch": 3, "hyper_parameters": {}},
    "a module's in a module": lambda w, _: prefixed("net.classifier.", w),
    "no average yet": lambda w, _: {"state_dict_ema": None, "model_ema": None, "model": "resnet", "state_dict": w},
    "the tutorial's": lambda w, _: {"model_state_dict": w, "optimizer_state_dict": {"state": {}}, "epoch": 3},
}


@pytest.mark.parametrize("kind", FILES)
def test_what_wrappers_and_libraries_add_is_removed(kind: str, net: Net, tmp_path: Path):
    torch.save(FILES[kind](net.state_dict(), net), tmp_path / "w.pth")
    load_weights(model := Net(), tmp_path / "w.pth")
    expected = net.state_dict()
    assert all(torch.equal(t, expected[name]) or "num_batches" in name for name, t in model.state_dict().items())


MISTAKES: dict[str, Any] = {
    "holds several models, such as student.body.0.bias, teacher.body.0.bias: keep one": lambda w: (
        prefixed("student.", w) | prefixed("teacher.", w)
    ),
    "holds several models, such as body.0.bias, ema.body.0.bias": lambda w: w | prefixed("ema.", w),
    "criterion.weight is [3] there, missing here": lambda w: (
        prefixed("model.", w) | {"criterion.weight": torch.ones(3)}
    ),
    "no weights by name, but only 'state_dict', 'epoch'": lambda _: {"state_dict": None, "epoch": 3},
    "head.bias is missing there, [3] here": lambda w: {k: t for k, t in w.items() if k != "head.bias"},
}


@pytest.mark.parametrize("said", MISTAKES)
def test_the_mistake_itself_is_named(said: str, net: Net, tmp_path: Path):
    torch.save(MISTAKES[said](net.state_dict()), tmp_path / "w.pth")
    with refused(said):
        load_weights(Net(), tmp_path / "w.pth")


def test_a_file_that_holds_itself_is_refused(tmp_path: Path):
    content = dict[str, Any]()
    content["model"] = content
    torch.save(content, tmp_path / "w.pth")
    with refused("no weights by name, but only 'model'"):
        load_weights(Net(), tmp_path / "w.pth")


@pytest.mark.parametrize("meta", [{"dataset_meta": {"classes": ("a", "b", "c")}}, {"CLASSES": ["a", "b", "c"]}])
def test_classes_of_another_order_are_refused_or_their_head_is_random(
    meta: dict[str, Any], net: Net, tmp_path: Path, capfd: pytest.CaptureFixture
):
    torch.save({"state_dict": net.state_dict(), "meta": meta}, tmp_path / "w.pth")
    model: Any = Net()
    model.names = ("a", "b", "c")
    load_weights(model, tmp_path / "w.pth", heads=["head"])
    assert torch.equal(model.head.weight, net.head.weight)
    model = Net()
    model.names = ("a", "c", "b")
    before = model.head.weight.clone()
    with refused("was trained with other data, output 1 is 'b' there, 'c' here"):
        load_weights(model, tmp_path / "w.pth")
    load_weights(model, tmp_path / "w.pth", heads=["head"])
    assert torch.equal(model.head.weight, before) and torch.equal(model.body[0].weight, net.body[0].weight)
    assert "random, because output 1 is 'b' there, 'c' here: head.weight, head.bias" in capfd.readouterr().err


def test_timms_folder_says_its_classes_and_normalization(net: Net, tmp_path: Path, capfd: pytest.CaptureFixture):
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    images = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    (tmp_path / "config.json").write_text(json.dumps({"label_names": ["a", "b", "c"], "pretrained_cfg": images}))
    model: Any = Net()
    model.names, model.statistics = ("a", "b", "c"), ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    load_weights(model, tmp_path)
    model.statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    with refused("was trained with images of mean and std ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]), which are ((0.485"):
        load_weights(model, tmp_path)
    assert "warning" not in capfd.readouterr().err
    load_weights(model, tmp_path, heads=["head"])
    assert "which are ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)) here: with ImageNet, add --timm_data" in (
        capfd.readouterr().err
    )
    model.names = ("c", "b", "a")
    with refused("output 0 is 'a' there, 'c' here"):
        load_weights(model, tmp_path)


def test_a_run_keeps_the_order_of_its_outputs(tmp_path: Path):
    def start(names: list[str]) -> None:
        keep_names(SimpleNamespace(rank=0, folder=SimpleNamespace(path=tmp_path, checkpoints=saved)), names)

    saved = tmp_path / "checkpoints"
    start(["a"])
    start(["0", "1", "2"])  # the start before saved nothing
    step = saved / "step000000003"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    start(["0", "1", "2"])
    start(["n01", "n02", "n03"])  # numbers of shards say nothing about folders
    with pytest.raises(UserError, match=r"other data, output 1 is '1' there, '10' here: restore the data, or .* --out"):
        start(["0", "10", "1"])
    (tmp_path / NAMES).write_text("[3]")
    with refused("names.json: is damaged (ValueError: no list of names)"):
        start(["0", "1", "2"])
