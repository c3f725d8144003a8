"""A config file of mmsegmentation, with base files of the installed package, trains and is tested on CamVid."""

import contextlib
import io
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn

from core.integrations.mmengine import CO2Hook
from core.testing import run_distributed
from tests.scripts import Mistakes, refused, run_on_worker, run_script

MODELS = {
    "upernet_r50": "backbone=dict(depth=18, base_channels=16, stem_channels=16), "
    "decode_head=dict(in_channels=[16, 32, 64, 128], {}), auxiliary_head=dict(in_channels=64, {})",
    "upernet_swin": "backbone=dict(embed_dims=32, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 8], window_size=4), "
    "decode_head=dict(in_channels=[32, 64, 128, 256], {}), auxiliary_head=dict(in_channels=128, {})",
    "upernet_vit-b16_ln_mln": "backbone=dict(img_size=(64, 64), embed_dims=32, num_layers=12, num_heads=2), "
    "neck=dict(in_channels=[32] * 4, out_channels=32), "
    "decode_head=dict(in_channels=[32] * 4, {}), auxiliary_head=dict(in_channels=32, {})",
}
CONFIG = """
_base_ = ["mmseg::_base_/models/{base}.py", "mmseg::_base_/default_runtime.py",
          "mmseg::_base_/schedules/schedule_20k.py"]
custom_imports = dict(imports=["segmentation.data"], allow_failed_imports=False)
model = dict(pretrained=None, data_preprocessor=dict(size=(64, 64)), {model})
camvid = dict(type="CamVid", root="{root}")
crop = [dict(type="RandomCrop", crop_size=(64, 64)), dict(type="PackSegInputs")]
train_dataloader = dict(batch_size=2, num_workers=0, sampler=dict(type="InfiniteSampler", shuffle=True),
                        dataset=dict(split="train", pipeline=crop, **camvid))
val_dataloader = dict(batch_size=1, num_workers=0, sampler=dict(type="DefaultSampler", shuffle=False),
                      dataset=dict(split="val", pipeline=[dict(type="PackSegInputs")], indices=4, **camvid))
test_dataloader = val_dataloader
val_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
test_evaluator = val_evaluator
train_cfg = dict(max_iters=4, val_interval=4)
default_hooks = dict(checkpoint=dict(interval=4))
flips = [dict(type="RandomFlip", prob=p, direction="horizontal") for p in (0.0, 1.0)]
tta_pipeline = [dict(type="TestTimeAug", transforms=[flips, [dict(type="PackSegInputs")]])]
"""


def written(folder: Path, base: str) -> Path:
    file = folder / f"{base}.py"
    model = MODELS[base].replace("{}", "channels=16, num_classes=11")
    file.write_text(CONFIG.format(base=base, model=model, root=os.environ.get("CO2_DATA", "data")))
    return file


def train(rank: int, world_size: int, folder: str, jobs: list[tuple[str, str]]) -> list[float]:
    """The mIoU that mmengine logs at the end of each job."""
    os.environ["LOCAL_RANK"] = str(rank)
    found = []
    for base, method in jobs:
        file, out = written(Path(folder), base), f"{folder}/{base}-{method}"
        options = ("--method", method, "--tau", "2", "--out", out, "--set", "log_level=INFO")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run_on_worker(rank, world_size, "segmentation.train", "--config", str(file), *options)
        if rank > 0:
            continue
        (log,) = Path(out).glob("*/*.log")
        found.append(float(re.findall(r"mIoU: ([\d.]+)", log.read_text())[-1]))
    return found


def scored(config: Path, checkpoint: Path, capfd: pytest.CaptureFixture, *options: str) -> float:
    out = str(checkpoint.with_name(f"test{len(options)}"))
    given = ("--config", str(config), "--test", str(checkpoint), "--out", out, *options)
    run_script("segmentation.train", *given)
    return float(re.findall(r"mIoU: ([\d.]+)", "".join(capfd.readouterr()))[-1])


needs_camvid = pytest.mark.skipif(
    not Path(os.environ.get("CO2_DATA", "data"), "camvid_240x180.npz").exists(), reason="needs CamVid"
)


@pytest.mark.slow
@needs_camvid
def test_published_models_train_under_every_method_and_are_tested(tmp_path: Path, capfd: pytest.CaptureFixture):
    jobs = [("upernet_r50", "ddp"), ("upernet_r50", "co2"), ("upernet_swin", "slowmo"), ("upernet_swin", "local")]
    jobs += [("upernet_vit-b16_ln_mln", "diloco"), ("upernet_vit-b16_ln_mln", "overlap_local")]
    ends = run_distributed(train, 2, str(tmp_path), jobs, timeout=600)[0]
    assert all(0 < end < 60 for end in ends)
    folder = tmp_path / "upernet_r50-co2"
    assert "co2" in torch.load(folder / "iter_4.pth", weights_only=False)
    both = tmp_path / "upernet_r50.py", folder / "iter_4.pth"
    assert scored(*both, capfd) == ends[1]
    assert 0 < scored(*both, capfd, "--tta") < 60


def test_sync_bn_is_converted_in_place() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4))
    weight = model[1].weight
    CO2Hook(sync_bn="convert").before_run(SimpleNamespace(model=model))  # type: ignore[arg-type]
    assert isinstance(model[1], nn.BatchNorm2d) and model[1].weight is weight
    assert model(torch.rand(2, 3, 5, 5)).mean().abs() < 1e-6  # which SyncBatchNorm refuses on a CPU
    of_videos = nn.Sequential(nn.Conv3d(3, 4, 1), nn.SyncBatchNorm(4))
    CO2Hook(sync_bn="convert").before_run(SimpleNamespace(model=of_videos))  # type: ignore[arg-type]
    assert of_videos(torch.rand(2, 3, 5, 5, 5)).mean().abs() < 1e-6


def test_several_optimizers_are_refused() -> None:
    wrappers = {f"w{i}": OptimWrapper(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)) for i in range(2)}
    with refused("CO2Hook: 2 optimizers: use one"):
        CO2Hook().before_train(SimpleNamespace(optim_wrapper=OptimWrapperDict(**wrappers)))  # type: ignore[arg-type]


def test_a_name_of_weights_is_one_file_with_or_without_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from segmentation.runner import read

    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    (folder := tmp_path / "backbones").mkdir()
    (config := tmp_path / "config.py").write_text("model = dict(pretrained='torchvision://resnet50')")
    (folder / "resnet50_v1c-2cccc1ad.pth").touch()
    assert read(config).model.pretrained == "torchvision://resnet50"
    (folder / "resnet50-0676ba61.pth").touch()
    assert read(config).model.pretrained.endswith(f"{folder}/resnet50-0676ba61.pth")
    (folder / "resnet50.pth").touch()
    with refused(f"pretrained=torchvision://resnet50: {folder} holds resnet50-0676ba61.pth and resnet50.pth: keep one"):
        read(config)


def test_mistakes_are_told_in_one_line(mistake: Mistakes, tmp_path: Path) -> None:
    given: Any = ("segmentation.train", "--config", "nowhere.py")
    assert "config=nowhere.py: no such file" in mistake(*given)
    assert "error: sync_bn='all' does not go with method='co2'" in mistake(*given, "--sync_bn", "all")
    assert "error: Unrecognized options: --methd, ddp; did you mean --method" in mistake(*given, "--methd", "ddp")
    (own := tmp_path / "own.py").write_text("custom_hooks = [dict(type='CO2Hook', tau=8)]")
    for method in ("ddp", "co2"):
        told = mistake("segmentation.train", "--config", str(own), "--method", method)
        assert f"config={own}: has a CO2Hook, and --method {method} chooses here" in told


OWN = """
model = dict(type="EncoderDecoder", data_preprocessor=dict(type="SegDataPreProcessor", size=(64, 64)),
             backbone=dict(type="ResNetV1c", depth=18, base_channels=8, stem_channels=8, with_cp=True),
             decode_head=dict(type="FCNHead", in_channels=64, in_index=3, channels=8, num_classes=3))
folder = dict(type="BaseSegDataset", data_root="{root}", data_prefix=dict(img_path="images", seg_map_path="masks"))
train_dataloader = dict(batch_size=2, dataset=dict(metainfo=dict(classes=("a", "b", "c")), **folder))
val_dataloader = dict(batch_size=1, dataset=dict(metainfo=dict(classes=({val})), **folder))
"""


def test_a_config_is_tried_without_training_and_its_data_checked_first(
    mistake: Mistakes, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    (config := tmp_path / "own.py").write_text(OWN.format(root=tmp_path, val="'a', 'b', 'c'"))
    given = ("segmentation.train", "--config", str(config), "--out", str(tmp_path / "run"))
    images, masks = tmp_path / "images", tmp_path / "masks"
    run_script(*given, "--dry_run")
    out, err = capfd.readouterr()
    assert "0.19 M parameters, 1 workers, co2, " in out and "type='CO2Hook'" in out
    assert f"warning: config={config}: {images} is missing: set CO2_DATA" in err
    assert f"error: config={config}: {images} is missing: set CO2_DATA" in mistake(*given)
    images.mkdir()
    assert "an image of train_dataloader is missing" in mistake(*given)
    (images / "0.jpg").touch()
    assert f"{masks}/0.png is missing" in mistake(*given)
    masks.mkdir()
    (masks / "0.png").touch()
    config.write_text(OWN.format(root=tmp_path, val="'a', 'c', 'b'"))
    said = "output 1 is 'b' in train_dataloader, 'c' in val_dataloader: give both data sets the same classes"
    assert f"error: config={config}: {said}" in mistake(*given)
    assert not (tmp_path / "run").exists(), "mmengine has written no log"


def test_a_checkpoint_of_other_classes_is_not_tested() -> None:
    from segmentation.runner import ClassOrder, ConfigOptions

    loader = SimpleNamespace(dataset=SimpleNamespace(metainfo={"classes": ("a", "b")}))
    runner: Any = SimpleNamespace(test_dataloader=loader, train_dataloader=loader, work_dir="w")
    for meta in ({"dataset_meta": {"classes": ("b", "a")}}, {"CLASSES": ["b", "a"]}):
        with refused("test=w.pth: was trained with other data, output 0 is 'b' there, 'a' here: give that data"):
            ClassOrder(ConfigOptions(Path("c.py"), test=Path("w.pth"))).after_load_checkpoint(runner, {"meta": meta})
        with refused("resume=True, work_dir=w: was trained with other data"):
            ClassOrder(ConfigOptions(Path("c.py"), resume=True)).after_load_checkpoint(runner, {"meta": meta})
        ClassOrder(ConfigOptions(Path("c.py"))).after_load_checkpoint(runner, {"meta": meta})  # its head may be other
