"""Vision's models and recipes, and batches of images in memory."""

from dataclasses import replace

import pytest
import torch

from core import UserError
from training.data import generator
from training.optim import make_optimizer
from vision import data
from vision.demo import table
from vision.model import build_model
from vision.pictures import labelled
from vision.recipes import RECIPES, digits_small, imagenet_swin_tiny, imagenet_vit_base
from vision.train import make_model


def test_recipes_follow_the_work_that_they_cite():
    """DeiT: repeated augmentation, no clipping; Swin: 20 epochs of warm-up, clipping by 5, jitter 0.4, no repeats."""
    vit, swin = imagenet_vit_base(), imagenet_swin_tiny()
    epoch = 1_281_167 // 4096
    for r, expected in ((vit, (3, None, 5 * epoch, 0.3)), (swin, (1, 5.0, 20 * epoch, 0.4))):
        assert (r.repeats, r.optim.clip_grad_norm, r.optim.warmup_steps, r.color_jitter) == expected
    assert all(r.co2.outer_momentum == 0.6 for r in RECIPES.values() if r.dataset == "imagenet"), "more than 64 GPUs"


@pytest.mark.parametrize("name", ["imagenet_vit_base", "imagenet_swin_tiny", "imagenet_resnet50", "digits_vit"])
def test_weight_decay_is_timms(name: str):
    from timm.optim import param_groups_weight_decay

    with torch.device("meta"):
        model = make_model(RECIPES[name])
        spared = getattr(model, "no_weight_decay", set)()
        theirs = param_groups_weight_decay(model, 0.05, no_weight_decay_list=spared)
    ours = make_optimizer(model, replace(RECIPES[name].optim, weight_decay=0.05)).param_groups
    decayed = {g["weight_decay"]: {id(p) for p in g["params"]} for g in ours}
    assert decayed == {g["weight_decay"]: {id(p) for p in g["params"]} for g in theirs}
    tables = [p for n, p in model.named_parameters() if "pos_embed" in n or "cls_token" in n or "position_bias" in n]
    assert (len(tables) > 0) == ("vit" in name or "swin" in name) and all(id(p) in decayed[0.0] for p in tables)


def test_stochastic_depth_where_a_model_has_none():
    with pytest.raises(UserError, match="drop_path=0.1: resnet_small has no stochastic depth"):
        build_model("resnet_small", num_classes=10, drop_path=0.1)
    with pytest.raises(UserError, match="drop_path=0.1: timm's vgg11 has no stochastic depth"):
        build_model("vgg11", num_classes=10, drop_path=0.1)
    with torch.device("meta"):
        assert sum(p.numel() for p in build_model("vgg11", num_classes=10).parameters()) > 100e6


def batches(start: int, rank: int = 0, *, augment: bool = True) -> list[torch.Tensor]:
    train, _ = data.digits()
    recipe = digits_small().__class__(augment=augment, batch_size=64)
    return [images for images, _ in train.train_batches(recipe, rank, 2, start, 25)]


def test_batches_do_not_depend_on_where_a_run_resumed():
    whole, tail = batches(0), batches(20)
    assert all(torch.equal(a, b) for a, b in zip(whole[20:], tail, strict=True)) and whole[0].shape == (32, 1, 8, 8)
    assert not torch.equal(whole[0], whole[22]), "the next epoch is shuffled anew"
    assert not torch.equal(whole[0], batches(0, rank=1)[0])
    assert not torch.equal(whole[0], batches(0, augment=False)[0])


def test_test_batches_cover_the_test_set_once():
    _, test = data.digits()
    labels = [y for rank in range(3) for _, y in test.test_batches(digits_small(), rank, 3, batch_size=50)]
    assert torch.equal(torch.cat(labels).bincount(), test.labels.bincount())


def test_crops_are_shifted_or_flipped_copies():
    image = torch.arange(64.0).view(1, 1, 8, 8).expand(64, 1, 8, 8)
    out = data.crop_and_flip(image, generator(0))
    assert out.shape == image.shape
    offsets = {tuple((out[i, 0, 3, 4] - image[i, 0, 3, 4]).view(1).int().tolist()) for i in range(64)}
    assert len(offsets) > 9, "three rows by three columns, flipped or not"
    assert set(out.unique().tolist()) <= set(range(64))


@pytest.mark.parametrize(
    ("name", "millions", "size"),
    [("resnet50", 25.557, 64), ("vit_base_patch16_224", 86.568, 224)],  # as published for ImageNet
)
def test_imagenet_models_have_their_published_size(name: str, millions: float, size: int):
    with torch.device("meta"):
        model = build_model(name, num_classes=1000)
        assert model(torch.empty(2, 3, size, size)).shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=5e-4)


SMALL_ONES = [("resnet_small", 3, 32), ("vit_small", 1, 8), ("swin_small", 1, 8), ("regnet_small", 1, 8)]


@pytest.mark.parametrize(("name", "channels", "size"), SMALL_ONES)
def test_small_models_train_on_both_sizes(name: str, channels: int, size: int):
    torch.manual_seed(0)
    model = build_model(name, num_classes=10, in_chans=channels, image_size=size)
    images, labels = torch.randn(8, channels, size, size), torch.arange(8)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_an_unknown_model_suggests_near_ones():
    with pytest.raises(UserError, match="'resnet5O' is unknown to timm; did you mean resnet5"):
        build_model("resnet5O", num_classes=10)


def test_pictures_are_large_and_name_both_labels():
    images = torch.rand(6, 1, 8, 8)
    figure = labelled(images, torch.tensor([3, 1, 0, 0, 0, 0]), torch.tensor([5, 1, 0, 0, 0, 0]), tuple("0123456789"))
    titles = [axes.title for axes in figure.axes]
    assert [t.get_text() for t in titles[:2]] == ["true 3\npredicted 5", "true 1\npredicted 1"]
    assert titles[0].get_color() != titles[1].get_color()  # a mistake is seen
    assert figure.axes[0].get_window_extent().height > 100  # pixels, of an image of 8


def test_the_demos_table_holds_ratios_against_ddp():
    base = {"test_top1": 0.5, "hidden_share": 0.25}
    summaries = {"ddp": base | {"steps_per_second": 2.0}, "co2": base | {"steps_per_second": 7.0}}
    assert table(summaries).splitlines()[-1] == "| co2 | 50.0% | 7.00 | 25% | 3.5 x |"
