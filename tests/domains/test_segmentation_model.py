"""UPerNet's configs: parameter counts against published figures, output shapes, losses, and checkpoints."""

import argparse
import hashlib
from pathlib import Path

import mmseg
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.runner.checkpoint import get_external_models
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

from core import UserError
from segmentation.model import BackboneName, build_model, upernet
from segmentation.recipes import RECIPES
from segmentation.train import make_model
from tests.damages import Hostile

MINIS = ("resnet_mini", "swin_mini", "vit_mini")


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# Swin: the table of its authors' segmentation repository; ResNet-101: the same paper's (Liu et al., ICCV 2021, table 3)
@pytest.mark.parametrize(
    "name, published", [("resnet101", 86), ("swin_tiny", 60), ("swin_small", 81), ("swin_base", 121)]
)
def test_parameter_counts_are_the_published_ones(name: BackboneName, published: int) -> None:
    with torch.device("meta"):
        model = build_model(upernet(name, 150, (512, 512)))
    assert round(count(model) / 1e6) == published


CONFIGS = Path(mmseg.__path__[0], ".mim", "configs")
OWN = {  # mmseg's, of three of our backbones
    "resnet50": CONFIGS / "upernet/upernet_r50_4xb4-160k_ade20k-512x512.py",
    "vit_base": CONFIGS / "vit/vit_vit-b16_mln_upernet_8xb2-160k_ade20k-512x512.py",
    "swin_tiny": CONFIGS / "swin/swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512.py",
}


@pytest.fixture(scope="module")
def mini() -> dict[str, torch.Tensor]:
    """The weights of a small backbone."""
    return build_model(upernet("resnet_mini", 11, (96, 96))).backbone.state_dict()


def test_state_dicts_have_the_shapes_of_mmsegs_own_configs_and_the_vit_is_timms():
    for name, file in OWN.items():
        theirs = Config.fromfile(file).model
        theirs["backbone"].pop("init_cfg", None)
        theirs["pretrained"] = None
        with torch.device("meta"):
            shapes = {k: v.shape for k, v in build_model(theirs).state_dict().items()}
            ours = build_model(upernet(name, 150, (512, 512))).state_dict()
        assert {k: v.shape for k, v in ours.items()} == shapes, name
    import timm  # needs torchvision, which training.prepared has prepared by now

    with torch.device("meta"):
        model = build_model(upernet("vit_base", 150, (512, 512)))
        reference = timm.create_model("vit_base_patch16_224", img_size=512, num_classes=0)
    # timm's has a norm behind the last block (2 x 768) and a bias in the patch embedding (768), mmseg's has neither
    assert count(model.backbone) == count(reference) - 3 * 768


def batch(n: int = 2, size: int = 64) -> dict:
    """Noisy images whose brightness tells the label, 0 to 10 in stripes, the last ignored; as a loader makes them."""
    rng = np.random.default_rng(0)
    label = np.arange(size) * 12 // size + np.zeros((size, 1), int)
    items = []
    for _ in range(n):
        image = (20 * label + rng.integers(0, 20, (3, size, size))).astype(np.uint8)
        sample = SegDataSample(gt_sem_seg=PixelData(data=torch.from_numpy(np.where(label == 11, 255, label))[None]))
        sample.set_metainfo({"img_shape": (size, size), "ori_shape": (size, size)})
        items.append({"inputs": torch.from_numpy(image), "data_samples": sample})
    return pseudo_collate(items)


@pytest.mark.parametrize("name", MINIS)
def test_losses_fall_and_predictions_have_the_image_size(name: BackboneName) -> None:
    torch.manual_seed(0)
    model = build_model(upernet(name, 11, (64, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    data, losses = batch(), []
    for _ in range(10):
        parts = model(**model.data_preprocessor(data, True), mode="loss")
        loss, logs = model.parse_losses(parts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert {"decode.loss_ce", "aux.loss_ce"} <= set(logs) and losses[-1] < 0.8 * losses[0]
    model.eval()
    for size in (64, 96):  # other sizes than the crop as well
        with torch.no_grad():
            (first, _) = model(**model.data_preprocessor(batch(2, size), False), mode="predict")
        assert first.pred_sem_seg.data.shape == (1, size, size) and first.seg_logits.data.shape == (11, size, size)


def test_pretrained_backbone_is_loaded_and_a_wrong_one_refused(tmp_path: Path, mini: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "backbone.pth"
    torch.save({"state_dict": mini}, path)
    model = build_model(upernet("resnet_mini", 11, (96, 96), pretrained=path))
    assert all(torch.equal(model.backbone.state_dict()[key], value) for key, value in mini.items())
    with pytest.raises(UserError, match="of the backbone's .* are missing.* same network"):
        build_model(upernet("swin_mini", 11, (96, 96), pretrained=path))
    with pytest.raises(UserError, match="no file .*absent.pth; give the file of a backbone.s weights"):
        build_model(upernet("resnet_mini", 11, (96, 96), pretrained=tmp_path / "absent.pth"))


def test_no_code_runs_from_a_backbones_file(tmp_path: Path, mini: dict[str, torch.Tensor]) -> None:
    for number, legacy in enumerate((False, True)):
        path = tmp_path / f"{number}.pth"
        content = {"state_dict": mini, "meta": Hostile(tmp_path / "made")}
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(UserError, match=rf"{path}: holds posix.mkdir.*keep only its weights"):
            build_model(upernet("resnet_mini", 11, (96, 96), pretrained=path))
        assert not (tmp_path / "made").exists()


def test_what_training_codes_put_beside_their_weights_is_read(tmp_path: Path, mini: dict[str, torch.Tensor]) -> None:
    """DeiT's and MAE's arguments of the command line, an accuracy that NumPy has computed, a checkpoint's optimiser."""
    arguments = argparse.Namespace(lr=0.1, out=tmp_path, milestones=[1, 2], best=np.float64(1.5))
    beside = {"args": arguments, "acc": np.float32(0.5), "curve": np.arange(3.0), "classes": np.array(["a", "b"])}
    for key in ("model", "state_dict"):
        torch.save({key: mini, **beside, "optimizer": {"state": {}}}, tmp_path / "full.pth")
        model = build_model(upernet("resnet_mini", 11, (96, 96), pretrained=tmp_path / "full.pth"))
        assert all(torch.equal(model.backbone.state_dict()[name], value) for name, value in mini.items())


@pytest.mark.parametrize("content", [b"", b"no weights", b"\x80\x04K\x01.", "list", "empty", "numbers", "cut"])
def test_a_file_of_no_weights_is_refused_by_name(tmp_path, content: bytes | str, mini: dict[str, torch.Tensor]):
    path = tmp_path / "backbone.pth"
    made = {"list": [mini], "empty": {}, "numbers": {"state_dict": {"stem.0.weight": 3}}, "cut": mini}
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(made[content], path)
        path.write_bytes(path.read_bytes()[: -1000 if content == "cut" else None])
    with pytest.raises(UserError, match=f"^pretrained={path}: "):
        build_model(upernet("resnet_mini", 11, (96, 96), pretrained=path))


@pytest.mark.parametrize("name", MINIS)
def test_weights_that_the_backbone_has_no_place_for_are_refused(tmp_path: Path, name: BackboneName) -> None:
    path, model = tmp_path / "backbone.pth", build_model(upernet(name, 11, (96, 96)))
    source, config = model.backbone.state_dict(), upernet(name, 11, (96, 96), pretrained=path)
    first = next(key for key in source if key.endswith("weight"))
    wrong = {
        "has 1 tensors.*no place": source | {"layers.99.ffn.weight": torch.ones(2)},
        "other shapes": source | {first: torch.ones(3, 3)},
        "are missing": {key: value for key, value in source.items() if key != first},
    }
    for why, state in wrong.items():
        torch.save(state, path)
        with pytest.raises(UserError, match=why):
            build_model(config)
    usual = {key: value for key, value in source.items() if not key.startswith("norm0")}  # Swin's for segmentation
    torch.save(usual | {"head.weight": torch.ones(2), "norm.bias": torch.ones(2)}, path)  # the classifier's
    build_model(config)


@pytest.mark.parametrize("name", MINIS)
def test_a_whole_segmentors_backbone_is_taken(tmp_path: Path, name: BackboneName) -> None:
    """mmengine's ResNet and ViT would find no name that they know, and start from random weights."""
    source = build_model(upernet(name, 11, (96, 96)))
    for prefix in ("", "module."):
        torch.save({"state_dict": {prefix + k: v for k, v in source.state_dict().items()}}, tmp_path / "whole.pth")
        model = build_model(upernet(name, 11, (96, 96), pretrained=tmp_path / "whole.pth"))
        wanted = source.backbone.state_dict()
        assert all(torch.equal(value, wanted[key]) for key, value in model.backbone.state_dict().items())


def test_a_recipes_backbone_lies_in_the_data_folder_and_its_hash_is_checked(tmp_path, monkeypatch, mini):
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    (folder := tmp_path / "backbones").mkdir()
    with pytest.raises(
        UserError, match=rf"resnet50_v1c-2cccc1ad.pth: no file {folder}/.*; fetch https://\S+/resnet50_v1c"
    ):
        make_model(RECIPES["ade20k_resnet50"])
    torch.save(mini, folder / "mini.pth")
    digest = hashlib.sha256((folder / "mini.pth").read_bytes()).hexdigest()
    (folder / "mini.pth").rename(folder / f"mini-{digest[:8]}.pth")
    build_model(upernet("resnet_mini", 11, (96, 96), pretrained=Path(f"mini-{digest[:8]}.pth")))
    (folder / f"mini-{digest[:8]}.pth").rename(folder / "mini-01234567.pth")
    with pytest.raises(UserError, match=f"its SHA-256 is {digest[:8]}..., not 01234567; fetch it again"):
        build_model(upernet("resnet_mini", 11, (96, 96), pretrained=Path("mini-01234567.pth")))


def test_every_ade20k_recipe_starts_from_the_weights_of_mmsegs_config() -> None:
    ade20k = [r for r in RECIPES.values() if r.dataset == "ade20k"]
    texts = [(CONFIGS / kind).glob("*upernet*ade20k-512x512.py") for kind in ("swin", "vit")]
    named = "".join(file.read_text() for files in texts for file in files)
    named += (CONFIGS / "_base_/models/upernet_vit-b16_ln_mln.py").read_text() + str(get_external_models().values())
    for recipe in ade20k:
        assert recipe.pretrained is not None and not recipe.pretrained.is_absolute()
        assert recipe.pretrained.name in named, recipe.name


def test_timms_vit_is_brought_to_mmsegs_names(tmp_path: Path) -> None:
    from timm.models import VisionTransformer  # needs torchvision, which training.prepared has prepared by now

    theirs = VisionTransformer(48, 8, embed_dim=96, depth=4, num_heads=3)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    ours = build_model(upernet("vit_mini", 11, (96, 96), pretrained=tmp_path / "vit.pth")).backbone
    pairs = [
        (ours.layers[2].attn.attn.in_proj_weight, theirs.blocks[2].attn.qkv.weight),
        (ours.layers[1].attn.attn.out_proj.bias, theirs.blocks[1].attn.proj.bias),
        (ours.layers[3].ln2.weight, theirs.blocks[3].norm2.weight),
        (ours.layers[0].ffn.layers[0][0].weight, theirs.blocks[0].mlp.fc1.weight),
        (ours.layers[0].ffn.layers[1].weight, theirs.blocks[0].mlp.fc2.weight),
        (ours.patch_embed.projection.weight, theirs.patch_embed.proj.weight),
        (ours.cls_token, theirs.cls_token),
        (ours.pos_embed[:, :1], theirs.pos_embed[:, :1]),
    ]
    assert all(torch.equal(mine, timms) for mine, timms in pairs)
    assert ours.pos_embed.shape == (1, 1 + 12 * 12, 96), "resized from 6 x 6 patches"
