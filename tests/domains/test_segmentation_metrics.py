"""mIoU, mAcc and aAcc against a case by hand, and mmseg's own evaluate()."""

import math

import pytest
import torch

from segmentation.metrics import SegmentationMetric

CLASSES = ("a", "b", "c", "absent")


def test_by_hand() -> None:
    """Two images of four pixels. a: 2 of 3 right and one b too many; b: 1 of 2; c: 2 of 2, one predicted for a."""
    metric = SegmentationMetric(CLASSES)
    metric.update(torch.tensor([[0, 0], [1, 2]]), torch.tensor([[0, 0], [1, 255]]))
    metric.update(torch.tensor([[2, 0], [2, 2]]), torch.tensor([[0, 1], [2, 2]]))
    result = metric.compute()
    assert result["IoU/a"] == pytest.approx(100 * 2 / 4)  # intersection 2, predicted 3, labelled 3
    assert result["IoU/b"] == pytest.approx(100 * 1 / 2) and result["IoU/c"] == pytest.approx(100 * 2 / 3)
    assert "IoU/absent" not in result and result["mIoU"] == pytest.approx(100 * (1 / 2 + 1 / 2 + 2 / 3) / 3)
    assert result["mAcc"] == pytest.approx(100 * (2 / 3 + 1 / 2 + 1) / 3)
    assert result["aAcc"] == pytest.approx(100 * 5 / 7)


def _maps(n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions and labels int64 [n, 20, 30] in three classes; about half of the pixels agree, some are ignored."""
    g = torch.Generator().manual_seed(0)
    label = torch.randint(0, 3, (n, 20, 30), generator=g)
    other = torch.randint(0, 3, label.shape, generator=g)
    prediction = torch.where(torch.rand(label.shape, generator=g) < 0.4, label, other)
    label[torch.rand(label.shape, generator=g) < 0.1] = 255
    return prediction, label


def test_agrees_with_mmsegs_own_evaluation() -> None:
    from mmseg.evaluation import IoUMetric

    prediction, label = _maps()
    theirs, ours = IoUMetric(), SegmentationMetric(CLASSES)
    theirs.dataset_meta = {"classes": CLASSES}
    for p, y in zip(prediction, label, strict=True):
        theirs.process({}, [{"pred_sem_seg": {"data": p[None]}, "gt_sem_seg": {"data": y[None]}}])
        ours.update(p, y)
    expected, result = theirs.evaluate(len(label)), ours.compute()
    for key in ("mIoU", "mAcc", "aAcc"):
        assert result[key] == pytest.approx(float(expected[key]), abs=0.006)  # mmseg rounds to two digits


def test_two_workers_of_uneven_shares_get_the_result_of_one() -> None:
    prediction, label = _maps(5)
    one, *shares = [SegmentationMetric(CLASSES) for _ in range(3)]
    for i, (p, y) in enumerate(zip(prediction, label, strict=True)):
        one.update(p, y)
        shares[i % 2].update(p, y)
    for mine, other in (shares, shares[::-1]):
        assert mine.compute(lambda areas, other=other: areas + other.areas) == one.compute() != mine.compute()
    assert not any(math.isnan(v) for v in one.compute().values())
