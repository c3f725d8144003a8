"""results/baselines.py on inputs whose baselines are computed by hand."""

import math

import numpy as np
import pytest
import torch

from results import baselines


def test_text_by_hand():
    train = np.array([0, 1, 0, 1])
    p = [3 / 7, 3 / 7, 1 / 7]  # each token counts once more than it occurs
    found = baselines.unigram_perplexity(train, np.array([0, 2]), 3)
    assert found == pytest.approx(math.exp(-(math.log(p[0]) + math.log(p[2])) / 2))
    after_0, after_1 = (2 + p[1]) / 3, p[1] / 2  # 0 is followed by 1 twice, and 1 by 0 once
    after_2 = p[0]  # 2 never occurs
    found = baselines.bigram_perplexity(train, np.array([0, 1, 1]), 3)
    assert found == pytest.approx(math.exp(-(math.log(after_0) + math.log(after_1)) / 2))
    assert baselines.bigram_perplexity(train, np.array([2, 0]), 3) == pytest.approx(1 / after_2)


def test_classes_and_positions_by_hand():
    assert baselines.majority_class(torch.tensor([0, 1, 1, 2]), torch.tensor([1, 1, 0, 2])) == 0.5
    train = np.array([[[0, 1]], [[0, 255]], [[1, 1]]], dtype=np.uint8)  # the prior is 0, 1
    val = np.array([[[0, 1]], [[0, 0]]], dtype=np.uint8)
    assert baselines.position_prior(train, val, 2) == pytest.approx(100 * (2 / 3 + 1 / 2) / 2)


def test_clouds_by_hand():
    train = torch.tensor([1.0, 0, 0]).expand(3, 4, 3)
    test = torch.zeros(2, 5, 3)
    test[1] += torch.tensor([1.0, 0, 0])
    assert baselines.fixed_points(train, test) == 1.0, "one cloud is at 1 + 1, the other at 0"
    visible = torch.tensor([[[0.0, 0, 0]]])
    assert baselines.distance(visible, torch.tensor([[[0.0, 0, 0], [0, 2, 0]]])) == 2.0, "0, and (0 + 4) / 2"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("digits_small", "digits_vit", True),
        ("surfaces_small", "surfaces_folding", True),
        ("gpt2_pydoc_small", "transnormer_pydoc_small", True),
        ("gpt2_pydoc_small", "roberta_pydoc_small", False),
        ("roberta_pydoc_small", "gpt2_gutenberg_small", False),
        ("modelnet10_mae_small", "modelnet10_small", False),
    ],
)
def test_recipes_share_baselines_if_data_and_objective_are_the_same(one: str, other: str, same: bool):
    assert baselines.same_data(one, other) is same


def test_a_higher_accuracy_and_a_lower_loss_are_better():
    assert baselines.beats([0.5, 0.7], "test_top1", 0.54) and not baselines.beats([0.5, 0.7], "test_top1", 0.55)
    assert baselines.beats([1.0, 3.0], "test_loss", 2.23) and not baselines.beats([1.0, 3.0], "val_perplexity", 2.22)
