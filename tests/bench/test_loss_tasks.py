"""bench.loss: its tasks, their data and models."""

from typing import Any

import pytest
import torch

from bench.loss import tasks
from bench.loss.__main__ import Plan, Stack, parse, train
from bench.loss.tasks import TASKS, load_task, places
from core.errors import UserError


def test_digits_have_three_parts_and_sorted_shards_of_no_more_workers_than_samples():
    task = load_task("digits")
    _, labels = task.draw(0, 0, 4, 16, "sorted")
    assert labels.shape == (4, 16) and all(labels[i].max() <= labels[i + 1].min() for i in range(3))
    inputs, iid = task.draw(0, 0, 4, 16, "iid")
    assert inputs.shape == (4, 16, 1, 8, 8) and len(iid[0].unique()) > 3
    again = task.draw(0, 0, 4, 16, "iid")[0]
    other = task.draw(0, 1, 4, 16, "iid")[0]
    assert torch.equal(inputs, again) and not torch.equal(inputs, other)
    tuning, test = (task.held_out[split][0].flatten(1) for split in ("tuning", "test"))
    assert (tuning[:, None] - test[None]).abs().amax(dim=2).min() > 0  # no image in both
    with pytest.raises(UserError, match="workers=9: the training set has 8 samples"):
        places(8, 0, 0, 9, 4, "sorted")


def test_a_byte_model_sees_no_later_byte():
    torch.manual_seed(0)
    model, text = tasks.ByteGPT(), torch.randint(256, (1, tasks.CONTEXT))
    changed = text.clone()
    changed[0, 30] = (changed[0, 30] + 1) % 256
    same = (model(text) - model(changed)).abs().amax(dim=2)[0] < 1e-6
    assert same[:30].all() and not same[30:].any()
    inputs, targets = tasks.windows(torch.arange(200, dtype=torch.uint8), torch.tensor([[5], [9]]), tasks.CONTEXT)
    assert inputs.shape == (2, 1, tasks.CONTEXT) and torch.equal(inputs + 1, targets)


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise in place of the data that would have to be there."""
    rng = torch.Generator().manual_seed(0)
    text = torch.randint(256, (5000,), generator=rng, dtype=torch.uint8)
    images, labels = torch.randn(64, 3, 16, 16, generator=rng), torch.arange(64) % 10
    held: Any = {"tuning": (images[:9], labels[:9]), "test": (images[9:20], labels[9:20])}
    monkeypatch.setattr(tasks, "books", lambda: (text, {"tuning": text[:999], "test": text[999:2222]}))
    monkeypatch.setattr(tasks, "tokens", tasks.books)
    few = {"vocab_size": 256, "n_embd": 16, "n_layer": 1, "n_head": 2}
    monkeypatch.setattr(tasks, "GPT2_SMALL", tasks.GPT2_SMALL | few)
    monkeypatch.setattr(tasks, "cifar_data", lambda: ((images, labels), held))


@pytest.mark.parametrize("name", TASKS)
def test_every_task_runs_stacked(no_data: None, name: str):
    """Workers have gradients of their own, as each would have alone; no buffer would have to change in training."""
    found = TASKS[name]()
    batch = found.draw(0, 1, 2, 4, "iid")
    assert all(torch.equal(*pair) for pair in zip(batch, found.draw(0, 1, 2, 4, "iid"), strict=True))
    stack = Stack(found)
    assert not any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in stack.model.modules())
    x = torch.stack([stack.start(0), stack.start(1)])
    rows = stack.gradient(x, batch)
    for i in range(2):
        alone = stack.gradient(x[i : i + 1], tuple(part[i : i + 1] for part in batch))
        torch.testing.assert_close(rows[i : i + 1], alone, rtol=1e-3, atol=1e-5)
    assert rows.isfinite().all() and (rows.norm(dim=1) > 0).all()
    inputs, targets = found.held_out["test"]
    assert stack.held_out_loss(x[0], (inputs[:5], targets[:5])) is not None
    assert found.draw(0, 0, 2, 4, "sorted")[0].shape == batch[0].shape


def test_gpt2_small_has_gpt2_smalls_parameters(no_data: None, monkeypatch: pytest.MonkeyPatch):
    task = TASKS["gpt2_small"]()
    monkeypatch.undo()
    with torch.device("meta"):
        assert sum(p.numel() for p in task.build().parameters()) == 124_439_808


@pytest.mark.parametrize("asked", ["ddp:wire=int4", "local", "local:wire=int4", "co2:merge=keep,gap=none,delay=1"])
def test_all_workers_lie_on_the_device(no_data: None, asked: str):
    """With the device "meta", whose tensors have no numbers, and which refuses an operation on two devices."""
    task = TASKS["bytes"]()
    plan = Plan("bytes", parse(asked)[0], 0.1, 2, 2, 3, 2, "iid", 0, "test")
    assert train(task, plan, device="meta")[1].x.is_meta


def test_local_sgd_over_a_narrow_wire_is_co2_without_delay_and_momentum():
    rng = torch.Generator().manual_seed(0)
    rows = []
    for asked in ("local:wire=int4", "co2:delay=0,gap=none,phi=none,beta=0,wire=int4", "local"):
        method: Any = parse(asked)[0].make(torch.zeros(2, 600), 2)
        for _ in range(4):
            method.x += torch.randn(2, 600, generator=rng.manual_seed(method.taken))
            method.taken += 1
            method.after_local_step()
        rows.append(method.x)
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])
