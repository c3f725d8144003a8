"""A run is evaluated again, and its model is loaded by the tools of other libraries, with the same numbers."""

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import training.prepared  # noqa: F401

# isort: split
import mmseg
import timm
import torch.nn.functional as F
from mmseg.evaluation import IoUMetric
from transformers import AutoModelForMaskedLM, AutoTokenizer, GPT2LMHeadModel

from core.testing import run_distributed
from language.data import CausalObjective, MaskedObjective, held_out_batches, open_corpus
from tests.runs import summary
from tests.scripts import Mistakes, refused, run_on_worker, run_script
from training.weights.read import load_weights
from vision.data import digits
from vision.model import classifier_names
from vision.recipes import digits_small
from vision.train import make_model

MMSEG_TEST = Path(mmseg.__path__[0], ".mim", "tools", "test.py")
TEXT = ("gpt2_pydoc_small", "--epoch_steps", "2", "--context", "32")
MASKED = ("roberta_pydoc_small", "--epoch_steps", "2", "--context", "32")


def trained(task: str, out: Path, *options: str) -> dict[str, Any]:
    run_script(f"{task}.train", *options, "--epochs", "1", "--device", "cpu", "--out", str(out))
    return summary(out)


def evaluated(task: str, *options: str | Path) -> dict[str, float]:
    out = Path(options[0]).with_suffix(".json")
    run_script(f"{task}.evaluate", *map(str, options), "--device", "cpu", "--out", str(out))
    return json.loads(out.read_text())


def exported(task: str, run: Path, name: str) -> Path:
    run_script(f"{task}.export", str(run), str(run.parent / name))
    return run.parent / name


def test_a_classifier_is_evaluated_again_and_is_timms(tmp_path: Path, mistake: Mistakes):
    run = tmp_path / "run"
    options = ("digits_small", "--model", "test_resnet", "--batch_size", "32")
    end = trained("vision", run, *options)
    again = evaluated("vision", run)
    assert {key: end[key] for key in again} == again and len(again) == 3
    file, folder = exported("vision", run, "m.safetensors"), exported("vision", run, "timms")
    assert evaluated("vision", run, "--weights", str(folder)) == again
    models = [
        timm.create_model("test_resnet", checkpoint_path=str(file), num_classes=10, in_chans=1),
        timm.create_model(f"local-dir:{folder}", pretrained=True),
    ]
    test = digits()[1]
    images = test.normalise(test.images)
    for model in models:
        with torch.no_grad():
            logits = model.eval()(images)
        assert (logits.argmax(1) == test.labels).float().mean().item() == pytest.approx(end["test_top1"], abs=1e-7)
        assert F.cross_entropy(logits, test.labels).item() == pytest.approx(end["test_loss"], rel=1e-6)
    assert models[1].pretrained_cfg["mean"] == pytest.approx(test.mean)
    graph = torch.export.load(exported("vision", run, "m.pt2")).module()
    torch.testing.assert_close(graph(images[:3]), logits[:3], rtol=1e-5, atol=1e-5)
    assert f"{file} is already there" in mistake("vision.export", str(run), str(file))
    assert file.stat().st_mode & 0o777 == 0o644
    assert "/proc/x.pth: cannot be written" in mistake("vision.export", str(run), "/proc/x.pth")
    assert json.loads((tmp_path / "timms" / "config.json").read_text())["label_names"] == list("0123456789")
    (run / "names.json").write_text(json.dumps(list("0132456789")))  # as if trained with classes in another order
    other = "was trained with other data, output 2 is '3' there, '2' here"
    assert f"run={run} {other}" in mistake("vision.evaluate", str(run))
    again_on = (*options, "--epochs", "1", "--device", "cpu", "--out", str(run), "--resume")
    assert f"{run} {other}: restore the data" in mistake("vision.train", *again_on)
    assert "is a run of recipe digits_small" in mistake("language.evaluate", str(run))
    assert "weights=nowhere: does not exist" in mistake("vision.evaluate", str(run), "--weights", "nowhere")


def test_a_tuned_classifier_has_new_classes(tmp_path: Path, capfd: pytest.CaptureFixture):
    other = timm.create_model("test_resnet", num_classes=100, in_chans=1)
    weights = {f"module.{name}": t for name, t in other.state_dict().items()}
    torch.save({"state_dict": weights}, tmp_path / "other.pth")
    model = make_model(replace(digits_small(), model="test_resnet"))
    load_weights(model, tmp_path / "other.pth", heads=classifier_names(model))
    assert "random, because their sizes differ: fc.weight, fc.bias" in capfd.readouterr().err
    first = next(iter(other.state_dict()))
    assert torch.equal(model.state_dict()[first], other.state_dict()[first])
    with refused("is of another model"):
        load_weights(model, tmp_path / "other.pth")


SMALL = ("digits_small", "--model", "test_resnet", "--batch_size", "64")


@pytest.mark.slow
def test_averaged_weights_are_evaluated_and_scaled_losses_change_nothing(tmp_path: Path):
    plain, half = (trained("vision", tmp_path / p, *SMALL, "--precision", p) for p in ("float32", "float16"))
    assert plain["test_loss"] == half["test_loss"]  # without a GPU there is no autocast, and the scale is a power of 2
    end = trained("vision", tmp_path / "ema", *SMALL, "--ema", "0.8")
    again = evaluated("vision", tmp_path / "ema")
    assert {key: end[key] for key in again} == again and end["test_loss"] != plain["test_loss"]


def averaged(rank: int, world_size: int, folder: str) -> None:
    for name, options in {"co2": ("--co2.tau", "4"), "ddp": ("--method", "ddp")}.items():
        given = (*SMALL, "--ema", "0.8", "--epochs", "2", "--device", "cpu", "--out", f"{folder}/{name}", *options)
        run_on_worker(rank, world_size, "vision.train", *given)


@pytest.mark.slow
def test_two_workers_have_one_average(tmp_path: Path):
    run_distributed(averaged, 2, str(tmp_path), timeout=300)
    for name in ("co2", "ddp"):
        end, again = summary(tmp_path / name), evaluated("vision", tmp_path / name)
        assert {key: end[key] for key in again} == pytest.approx(again, rel=1e-6), name


@pytest.mark.slow
def test_gpt2_and_roberta_are_transformers(tmp_path: Path):
    for name, options in (("gpt2", TEXT), ("roberta", MASKED)):
        run = tmp_path / name
        end = trained("language", run, *options)
        folder = exported("language", run, f"{name}-hf")
        again = evaluated("language", run, "--weights", str(folder))
        assert {key: end[key] for key in again} == pytest.approx(again, rel=1e-6)
        corpus = open_corpus("pydoc", 1024)
        masked = MaskedObjective(32, corpus.vocab_size, corpus.eot, corpus.mask or 0, corpus.bos)
        objective = CausalObjective(32) if name == "gpt2" else masked
        kind: Any = GPT2LMHeadModel if name == "gpt2" else AutoModelForMaskedLM
        model, tokenizer = kind.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        nats = count = 0.0
        with torch.no_grad():
            for inputs, targets in held_out_batches(corpus.val, objective, 16, rank=0, world_size=1):
                logits = model(input_ids=inputs).logits
                nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
                count += (targets >= 0).sum().item()
        assert nats / count == pytest.approx(end["val_loss"], rel=1e-6), name
        assert tokenizer.eos_token_id == corpus.eot == model.config.eos_token_id


@pytest.mark.slow
def test_point_clouds_are_evaluated_again(tmp_path: Path):
    end = trained("pointcloud", tmp_path / "run", "surfaces_small", "--points", "64")
    again = evaluated("pointcloud", tmp_path / "run")
    assert {key: end[key] for key in again} == again
    weights = exported("pointcloud", tmp_path / "run", "m.safetensors")
    assert evaluated("pointcloud", tmp_path / "run", "--weights", str(weights)) == again
    graph = torch.export.load(exported("pointcloud", tmp_path / "run", "m.pt2")).module()
    assert graph(torch.rand(3, 64, 3)).shape == (3, 64, 3)


@pytest.mark.slow
@pytest.mark.parametrize("tta", [False, True])
def test_mmsegs_own_test_tool_scores_the_same(tmp_path: Path, tta: bool, monkeypatch: pytest.MonkeyPatch):
    run, found = tmp_path / "run", {}
    end = trained("segmentation", run, "digits_small", "--optim.lr", "0.01")
    assert evaluated("segmentation", run) == {key: value for key, value in end.items() if key.startswith("val_")}
    file = exported("segmentation", run, "m.pth")
    compute = IoUMetric.compute_metrics

    def kept(metric: IoUMetric, results: list[Any]) -> Any:
        totals = [sum(parts) for parts in zip(*results, strict=True)]
        values = IoUMetric.total_area_to_metrics(*totals, ["mIoU"])
        found["mIoU"] = 100 * torch.as_tensor(values["IoU"]).nanmean().item()
        return compute(metric, results)

    monkeypatch.setattr(IoUMetric, "compute_metrics", kept)
    options = [str(file.with_suffix(".py")), str(file), "--work-dir", str(tmp_path), *["--tta"] * tta]
    monkeypatch.setattr("sys.argv", [str(MMSEG_TEST), *options])
    runpy.run_path(str(MMSEG_TEST), run_name="__main__")
    assert found["mIoU"] == pytest.approx(end["val_mIoU"], rel=1e-6) or tta and found["mIoU"] > 0


def sharded(rank: int, world_size: int, folder: str) -> None:
    options = {"zero": ("--per_node", "2", "--zero", "3"), "layout": ("--layout", "tp2", "--no_recommended")}
    for name, given in options.items():
        out = ("--epochs", "1", "--device", "cpu", "--out", f"{folder}/{name}")
        run_on_worker(rank, world_size, "language.train", *TEXT, *out, *given)


@pytest.mark.slow
def test_one_process_evaluates_what_several_shared(tmp_path: Path):
    run_distributed(sharded, 2, str(tmp_path), timeout=300)
    for name in ("zero", "layout"):
        end, again = summary(tmp_path / name), evaluated("language", tmp_path / name)
        assert {key: end[key] for key in again} == pytest.approx(again, rel=1e-6), name
