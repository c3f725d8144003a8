"""bench.search: its optimisers and methods against plain formulas, its command line, its rows and its tables."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.search import command, methods, pictures, texts
from bench.search.command import Search, at_most, parse, plans, search
from bench.search.engine import TASKS, Plan, Result, Stack, load_task, run, train
from bench.search.methods import ACCO, DPU, mean_over
from bench.search.rows import Rows, markdown
from bench.search.task import Inner, Task, clip_rows, matrices_inside, places, stacked_draw
from core.errors import UserError
from tests.problems import small_net
from tests.scripts import Mistakes, run_script


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Task:
    """A task that takes a moment, in place of digits."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(240, 6, generator=generator)
    labels = inputs[:, :3].argmax(dim=1)
    held = {"tuning": (inputs[:20], labels[:20]), "test": (inputs[20:40], labels[20:40])}
    draw = stacked_draw(inputs[40:], labels[40:])
    cross_entropy = torch.nn.functional.cross_entropy
    build = lambda: small_net(torch.float32)  # noqa: E731
    task = Task("digits", "three classes", build, cross_entropy, draw, held, Inner("sgd", 0.1), batch=4)
    monkeypatch.setattr(command, "load_task", lambda name: task)
    return task


def options(folder: Path, **values: Any) -> Search:
    usual: dict[str, Any] = {"tasks": ("digits",), "methods": ("local", "co2"), "steps": 9, "tau": 3, "seeds": (0, 1)}
    return Search(**usual | {"configurations": 4, "rows": folder / "rows.jsonl"} | values)


# -- formulas ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "theirs"),
    [
        (Inner("sgd", 0.1, momentum=0.8), lambda p: torch.optim.SGD(p, 0.1, momentum=0.8)),
        (Inner("adamw", 0.1, weight_decay=0.3), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3)),
        (Inner("adamw", 0.1, clip=0.5), lambda p: torch.optim.AdamW(p, 0.1)),
    ],
)
def test_the_inner_optimisers_are_torchs_row_by_row(inner: Inner, theirs: Any):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    rows = [torch.nn.Parameter(row.clone()) for row in x]
    optimizers, state = [theirs([row]) for row in rows], inner.start(x)
    for _ in range(4):
        gradients = torch.randn(3, 5, generator=generator, dtype=torch.float64)
        untouched = x.clone()
        state.copy().step(untouched, gradients, 0.1)
        state.step(x, gradients, 0.1)
        assert torch.equal(untouched, x)  # a copy has the same state, and leaves it alone
        for row, gradient, optimizer in zip(rows, gradients, optimizers, strict=True):
            row.grad = gradient.clone()
            if inner.clip:
                torch.nn.utils.clip_grad_norm_([row], inner.clip)
            optimizer.step()
    torch.testing.assert_close(x, torch.stack([row.detach() for row in rows]), rtol=1e-12, atol=1e-12)


def test_muon_is_torchs_row_by_row():
    """Its iterations are in bfloat16, in which a product of all workers' matrices is rounded otherwise than of one."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))
    inner = Inner("muon", 0.1, weight_decay=0.3, matrices=matrices_inside(model, "1."))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 23, generator=generator)
    state, rows = inner.start(x), [[torch.nn.Parameter(p.clone()) for p in row.split([8, 10, 5])] for row in x]
    muons = [torch.optim.Muon([row[1].data.view(5, 2)], 0.1, 0.3, adjust_lr_fn="match_rms_adamw") for row in rows]
    adamws = [torch.optim.AdamW([row[0], row[2]], 0.1, weight_decay=0.3) for row in rows]
    for _ in range(4):
        gradients = torch.randn(2, 23, generator=generator)
        state.step(x, gradients, 0.1)
        for row, gradient, muon, adamw in zip(rows, gradients, muons, adamws, strict=True):
            parts = gradient.split([8, 10, 5])
            muon.param_groups[0]["params"][0].grad = parts[1].view(5, 2).clone()
            row[0].grad, row[2].grad = parts[0].clone(), parts[2].clone()
            muon.step()
            adamw.step()
    theirs = torch.stack([torch.cat([p.detach().flatten() for p in row]) for row in rows])
    torch.testing.assert_close(x, theirs, rtol=0.01, atol=0.01)


def test_gradients_are_clipped_by_row():
    rows = clip_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    torch.testing.assert_close(rows, torch.tensor([[0.6, 0.8], [0.3, 0.4]]), rtol=1e-5, atol=1e-5)


def offset(x: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    """A gradient that shows where it was taken, and of which samples: x plus their mean."""
    return x + batch[0].mean(dim=1, keepdim=True)


def batches(steps: int) -> list[tuple[Tensor, ...]]:
    """Two workers of two samples: 1 and 3 in the first half, 10 and 30 in the second; times the step's number."""
    return [((step + 1) * torch.tensor([[1.0, 10.0], [3.0, 30.0]]).double(),) for step in range(steps)]


def test_dpu_applies_each_gradient_one_step_late():
    x = torch.zeros(2, 1, dtype=torch.float64)
    method, inner = DPU(x, 1), Inner("sgd", 0.1, momentum=0.0).start(x)
    seen = [0.0]
    for step, batch in enumerate(batches(4)):
        seen.append(seen[step] - (0.1 * (seen[step - 1] + 11.0 * step) if step else 0.0))
        method.train_step(offset, batch, inner, 0.1)
        assert x[:, 0].tolist() == [pytest.approx(seen[-1])] * 2


def test_acco_by_hand():
    """First halves' means 2, 4, 6; second halves' 20, 40."""
    x = torch.zeros(2, 1, dtype=torch.float64)
    method, inner = ACCO(x, 1), Inner("sgd", 0.1, momentum=0.0).start(x)
    for batch in batches(3):
        method.train_step(offset, batch, inner, 0.1)
    x1 = -0.1 * 2  # h_1 = 20, at x_0
    estimate = x1 - 0.1 * 20
    x2 = x1 - 0.1 * (20 + x1 + 4) / 2
    x3 = x2 - 0.1 * (estimate + 40 + x2 + 6) / 2
    assert x[:, 0].tolist() == [pytest.approx(x3)] * 2


def steady(x: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    """1 for the first worker, 3 for the second, everywhere."""
    return torch.tensor([[1.0], [3.0]], dtype=x.dtype).expand_as(x)


def test_streaming_diloco_by_hand():
    """Two fragments of one parameter, tau 2: the first is sent after 1, 3, ... steps, the second after 2, 4, ...; each
    mean is merged a step later, with a Nesterov step of the fragment's outer iterate z, half of which is taken."""
    x = torch.zeros(2, 2, dtype=torch.float64)
    settings = parse("streaming:fragments=2,alpha=0.5,beta=0.5")[0]
    method, inner = settings.make(x, 2), Inner("sgd", 1.0, momentum=0.0).start(x)
    expected = [
        ([-1, -3], [-1, -3]),
        ([-1.75, -3.75], [-2, -6]),  # sent 2: m = 2, z = -0.5 (0.5 * 2 + 2) = -1.5
        ([-2.75, -6.75], [-3, -6]),  # sent 4: m = 4, z = -0.5 (0.5 * 4 + 4) = -3
        ([-3.96875, -6.96875], [-4, -9]),  # sent 3.25: m = 1 + 3.25, z = -1.5 - 0.5 (0.5 * 4.25 + 3.25) = -4.1875
    ]
    for first, second in expected:
        method.train_step(steady, (), inner, 1.0)
        assert (x[:, 0].tolist(), x[:, 1].tolist()) == (first, second)
    method.finish()
    assert torch.equal(x[0], x[1])


def test_des_loc_averages_each_moment_in_its_own_rounds():
    x = torch.zeros(2, 1, dtype=torch.float64)
    method, inner = parse("des_loc")[0].make(x, 2), Inner("adamw", 0.1).start(x)
    alike = []
    for _ in range(24):
        method.train_step(steady, (), inner, 0.1)
        alike.append([bool(value[0] == value[1]) for value in (x, *(moment for moment, _ in inner.moments()))])
    rounds = [r + 1 for r in range(12) if alike[2 * r + 1][1]], [r + 1 for r in range(12) if alike[2 * r + 1][2]]
    assert rounds == ([3, 6, 9, 12], [6, 12])
    assert [i + 1 for i in range(24) if alike[i][0]] == [*range(2, 25, 2)]


def test_a_moment_that_comes_late_is_what_it_would_have_become():
    """Momentum 0.5, gradients 1 and 3: after two steps 1.5 and 4.5, mean 3; a step later 0.5 * 3 + 1 and + 3."""
    x = torch.zeros(2, 1, dtype=torch.float64)
    settings = parse("co2:merge=keep,gap=none,beta=0,delay=1,first_every=1")[0]
    method, inner = settings.make(x, 2), Inner("sgd", 1.0, momentum=0.5).start(x)
    seen = []
    for _ in range(3):
        method.train_step(steady, (), inner, 1.0)
        seen.append(inner.first[:, 0].tolist())
    assert seen == [[1, 3], [1.5, 4.5], [2.5, 4.5]]


def test_a_narrow_wire_sends_later_what_it_rounded_off():
    """Scale 1: a block's largest magnitude is 7. What is left of 0.4, 0.8, 0.2, 0.6, 0.0 is sent in the next."""
    sent = torch.zeros(2, 300)
    sent[:, 0], sent[:, 1] = 7.0, 0.4
    mean, everyone = mean_over("int4"), torch.ones(2)
    seen = [mean(sent, everyone)[:3] for _ in range(5)]
    assert [part[1].item() for part in seen] == [0, 1, 0, 1, 0] and all(part[0] == 7 and part[2] == 0 for part in seen)
    assert mean_over("float32")(sent, everyone)[1] == pytest.approx(0.4)


def test_ddp_sends_gradients_over_the_wire():
    x = torch.zeros(2, 2)
    method, inner = parse("ddp:wire=int4")[0].make(x, 1), Inner("sgd", 1.0, momentum=0.0).start(x)
    for step in range(2):
        method.train_step(lambda x, _: torch.tensor([[7.0, 0.4], [7.0, 0.4]]), (), inner, 1.0)
        assert x.tolist() == [[-7.0 * (step + 1), -float(step)]] * 2


def plan(task: Task, method: str, **values: Any) -> Plan:
    usual: dict[str, Any] = {"workers": 4, "batch": 4, "steps": 8, "tau": 3, "shards": "iid", "seed": 0}
    return Plan(task.name, parse(method)[0], 0.1, **usual | {"split": "test"} | values)


@pytest.mark.parametrize(
    "name",
    [
        *("ddp", "dpu", "acco", "local", "slowmo", "diloco", "overlap_local", "co2", "co2:merge=keep,delay=1"),
        *("ddp:wire=int8", "streaming:fragments=2", "des_loc", "co2:merge=keep,delay=1,wire=int4,fragments=3"),
    ],
)
def test_every_method_ends_with_equal_workers_and_learns(tiny: Task, name: str):
    stack, method = train(tiny, replace(plan(tiny, name, steps=40), lr=0.05))
    method.finish()
    assert (method.x - method.x[0]).abs().max() < 1e-6
    start, end = (stack.held_out_loss(x, tiny.held_out["test"]) for x in (stack.start(0), method.x[0]))
    assert start is not None and end is not None and end < start
    assert run(tiny, plan(tiny, name)).loss is not None


def test_blocking_methods_agree_where_they_should(tiny: Task):
    """SlowMo without momentum is Local-SGD; at tau 1 with SGD so is DDP; and CO2 without delay, penalty and clip."""
    local = run(tiny, plan(tiny, "local")).loss
    assert run(tiny, plan(tiny, "slowmo:beta=0")).loss == pytest.approx(local, rel=1e-5)
    assert run(tiny, plan(tiny, "co2:delay=0,beta=0,gap=none,phi=none")).loss == pytest.approx(local, rel=1e-5)
    one, ddp = run(tiny, plan(tiny, "local", tau=1)), run(tiny, plan(tiny, "ddp"))
    assert one.loss == pytest.approx(ddp.loss, rel=1e-5)


def test_a_run_that_diverges_has_no_loss(tiny: Task):
    result = run(tiny, Plan(tiny.name, parse("ddp")[0], 1e38, 2, 4, 20, 3, "iid", 0, "test"))
    assert result.loss is None and result.loss_of_mean is None


# -- data -------------------------------------------------------------------------------------------------------


def test_digits_have_three_parts_and_sorted_shards():
    task = load_task("digits")
    _, labels = task.draw(0, 0, 4, 16, "sorted")
    assert labels.shape == (4, 16)
    assert all(labels[i].max() <= labels[i + 1].min() for i in range(3))
    inputs, iid = task.draw(0, 0, 4, 16, "iid")
    assert inputs.shape == (4, 16, 1, 8, 8) and len(iid[0].unique()) > 3
    again = task.draw(0, 0, 4, 16, "iid")[0]
    other = task.draw(0, 1, 4, 16, "iid")[0]
    assert torch.equal(inputs, again) and not torch.equal(inputs, other)
    tuning, test = (task.held_out[split][0].flatten(1) for split in ("tuning", "test"))
    assert (tuning[:, None] - test[None]).abs().amax(dim=2).min() > 0  # no image in both


def test_more_workers_than_samples_have_no_parts():
    with pytest.raises(UserError, match="workers=9: the training set has 8 samples"):
        places(8, 0, 0, 9, 4, "sorted")


def test_a_byte_model_sees_no_later_byte():
    torch.manual_seed(0)
    model, text = texts.ByteGPT(), torch.randint(256, (1, texts.CONTEXT))
    changed = text.clone()
    changed[0, 30] = (changed[0, 30] + 1) % 256
    same = (model(text) - model(changed)).abs().amax(dim=2)[0] < 1e-6
    assert same[:30].all() and not same[30:].any()
    inputs, targets = texts.windows(torch.arange(200, dtype=torch.uint8), torch.tensor([[5], [9]]))
    assert inputs.shape == (2, 1, texts.CONTEXT) and torch.equal(inputs + 1, targets)


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise in place of the data that would have to be there."""
    rng = torch.Generator().manual_seed(0)
    text = torch.randint(256, (5000,), generator=rng, dtype=torch.uint8)
    images, labels = torch.randn(64, 3, 16, 16, generator=rng), torch.arange(64) % 10
    held: Any = {"tuning": (images[:9], labels[:9]), "test": (images[9:20], labels[9:20])}
    monkeypatch.setattr(texts, "books", lambda: (text, {"tuning": text[:999], "test": text[999:2222]}))
    monkeypatch.setattr(texts, "tokens", texts.books)
    few = {"vocab_size": 256, "n_embd": 16, "n_layer": 1, "n_head": 2}
    monkeypatch.setattr(texts, "GPT2_SMALL", texts.GPT2_SMALL | few)
    monkeypatch.setattr(pictures, "cifar_data", lambda: ((images, labels), held))


FAR = {"segmentation": pytest.mark.slow}  # mmseg alone takes seconds to import


@pytest.mark.parametrize("name", [pytest.param(name, marks=FAR.get(name, ())) for name in TASKS])
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


def test_what_roberta_predicts_is_hidden_from_it(no_data: None):
    inputs, targets = TASKS["roberta"]().draw(0, 0, 2, 4, "iid")
    asked = targets >= 0
    assert inputs.shape == (2, 4, texts.CONTEXT + 2) and 0.05 < asked.float().mean() < 0.3
    assert (inputs[asked] == texts.MASK).float().mean() > 0.5
    assert (targets[asked] >= texts.FIRST_BYTE).all() and not (inputs[~asked] == texts.MASK).any()
    assert (inputs[..., 0] == texts.END).all() and (inputs[..., -1] == texts.END).all()


def test_local_sgd_over_a_narrow_wire_is_co2_without_delay_and_momentum():
    rng = torch.Generator().manual_seed(0)
    rows = []
    for asked in ("local:wire=int4", "co2:delay=0,gap=none,phi=none,beta=0,wire=int4", "local"):
        method: Any = parse(asked)[0].make(torch.zeros(2, 600), 2)
        for _ in range(4):
            method.x += torch.randn(2, 600, generator=rng.manual_seed(method.taken))
            method.taken += 1
            method.local_step()
        rows.append(method.x)
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])


# -- command ----------------------------------------------------------------------------------------------------


def test_a_method_and_its_options():
    assert [str(s) for s in parse("co2")] == ["co2", "co2:beta=0"]
    assert [str(s) for s in parse("co2:merge=mix,delay=3,beta=0|0.3")] == [
        "co2:beta=0,delay=3,merge=mix",
        "co2:beta=0.3,delay=3,merge=mix",
    ]
    keep = methods.Settings("co2", parse("co2:merge=keep,phi=none,nesterov=true")[0].options)
    made: Any = keep.make(torch.zeros(2, 1), 3)
    part = made.parts[0]
    assert (part.merge, part.phi, part.delay) == ("keep", None, None)


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ("ddp", 0),
        ("streaming", 1),
        ("des_loc", 0),
        ("acco", 0.5),
        ("dpu", 1),
        ("local", 0),
        ("overlap_local", 6),
        ("co2", 6),
        ("co2:delay=2", 2),
    ],
)
def test_how_long_a_mean_may_take_unnoticed(asked: str, steps: float):
    assert parse(asked)[0].hidden_steps(6) == steps


@pytest.mark.parametrize(
    ("asked", "bits"),
    [
        *(("ddp", 32), ("acco", 64), ("local", 4), ("co2:wire=int8", 8.125 / 8), ("ddp:wire=int4", 4.125)),
        ("des_loc", 4 * (1 + 1 / 3 + 1 / 6)),
    ],
)
def test_how_many_bits_a_parameter_takes_a_step(asked: str, bits: float):
    assert parse(asked)[0].bits_a_step(8) == pytest.approx(bits)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--tasks birds", "tasks: 'birds' does not exist; choose among digits, cifar, cifar_vit"),
        ("--tau 0", "tau=0: give 1 or more"),
        ("--steps 0", "steps=0: give 1 or more"),
        ("--workers 0", "workers=0: give a number above 0"),
        ("--methods adam", "method 'adam' does not exist; choose among ddp, dpu"),
        ("--methods co2:speed=1", "co2 has no option 'speed'"),
        ("--methods local:beta=1", "local has no option 'beta'; it has: wire"),
        ("--device cuda", "device=cuda: this torch finds no CUDA device"),
        ("--methods co2:merge=half", "merge='half'; choose among outer, mix, keep"),
        ("--methods co2:beta=x", "beta='x'; give a number, 0 or more"),
        ("--methods co2:delay=1.5", "delay='1.5'; give a whole number, 0 or more"),
        ("--methods co2:fragments=9 --tau 6", "fragments=9: between 1 and tau=6"),
        ("--methods co2:fragments=2,gap=inner", "fragments: they have no gap inner"),
        ("--methods ddp:wire=int1", "wire='int1'; choose among float32, bfloat16"),
        ("--methods co2:nesterov=1", "nesterov='1'; choose true or false"),
        ("--methods co2:delay=9 --tau 6", "delay=9: between 0 and tau=6"),
        ("--methods co2:beta=0|0.1|0.2 --configurations 2", "make 3 configurations; allow as many"),
        ("--seeds 0 1 --tuning_seeds 1", "seeds=1: it is a tuning seed too"),
        ("--budget_minutes 0", "budget_minutes=0.0: give a number above 0"),
        ("--batch 7 --methods acco", "batch=7: acco halves it"),
        ("--report", "no rows to report"),
    ],
)
def test_mistakes(mistake: Mistakes, tmp_path: Path, arguments: str, said: str):
    message = mistake("bench.search", *arguments.split(), "--rows", str(tmp_path / "rows.jsonl"))
    assert said in message and message.startswith("error: ") and message.count("\n") == 1


def test_every_method_gets_equally_many_configurations(tmp_path: Path, tiny: Task):
    o = Search(rows=tmp_path / "rows.jsonl")
    o.check()
    assert {len(o.candidates(asked)) for asked in o.methods} == {o.configurations}
    assert [p.lr for p in plans(options(tmp_path), "digits", 4, "local")] == pytest.approx([0.1, 0.2, 0.05, 0.1414])


def test_a_second_search_runs_nothing_anew(tmp_path: Path, tiny: Task, capsys: pytest.CaptureFixture):
    o = options(tmp_path)
    search(o, Rows(o.rows))
    assert f"complete; {at_most(o)} runs were new" in capsys.readouterr().out
    lines = o.rows.read_text()
    search(o, Rows(o.rows))
    assert "complete; 0 runs were new" in capsys.readouterr().out
    assert o.rows.read_text() == lines
    one_more = options(tmp_path, seeds=(0, 1, 2))
    search(one_more, Rows(o.rows))
    assert "complete; 2 runs were new" in capsys.readouterr().out  # one a method


def test_the_best_on_tuning_seed_and_split_is_reported_on_others(tmp_path: Path, tiny: Task):
    o = options(tmp_path, tuning_seeds=(7, 8))
    search(o, rows := Rows(o.rows))
    for asked in o.methods:
        tried = plans(o, "digits", 4, asked)
        best = min(tried, key=lambda p: command.tuning_loss(o, rows, p))
        choice = next(row for (_, _, name), row in rows.choices.items() if name == asked)
        assert (choice["lr"], choice["options"]) == (best.lr, dict(best.settings.options)) and choice["tried"] == 4
    assert {(r["split"], r["seed"]) for r in rows.runs.values()} == {
        *(("tuning", seed) for seed in (7, 8)),
        *(("test", seed) for seed in (0, 1)),
    }


def test_a_budget_stops_between_runs(
    tmp_path: Path, tiny: Task, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    o = options(tmp_path, budget_minutes=1.0)
    monkeypatch.setattr(command, "run", lambda task, plan, compile, device: Result(1.0, 1.0, 40.0))
    monkeypatch.setattr(command.time, "monotonic", iter([0.0, 0.0, 19.0, 21.0]).__next__)
    search(o, rows := Rows(o.rows))
    assert "stopped after 2 runs: budget_minutes=1;" in capsys.readouterr().out and len(rows.runs) == 2


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path, tiny: Task, capsys: pytest.CaptureFixture):
    o = options(tmp_path, methods=("ddp",), lr_factors=(1.0,))
    search(o, Rows(o.rows))
    o.rows.write_bytes(o.rows.read_bytes()[:-40])
    capsys.readouterr()
    search(o, Rows(o.rows))
    assert "complete; 1 runs were new" in capsys.readouterr().out
    assert len(Rows(o.rows).runs) == 2 and o.rows.read_text().count("\n") == 3
    o.rows.write_text("not a row\n")
    with pytest.raises(UserError, match="line 1 is no row"):
        Rows(o.rows)


def test_the_table(tmp_path: Path, tiny: Task):
    o = options(tmp_path, methods=("local", "co2:beta=0|0.5"))
    rows = Rows(o.rows)
    results = {"local": [0.5, 0.6], "co2": [0.4, None]}

    def add(asked: str, losses: list[float | None]) -> None:
        best = plans(o, "digits", 4, asked)[0]
        rows.add_choice(asked, o.tuning, best, 4, o.tuning_seeds)
        for seed, loss in enumerate(losses):
            rows.add_run(replace(best, seed=seed, split="test"), Result(loss, loss, 1.0))

    add("local", results["local"])
    add("co2:beta=0|0.5", results["co2"])
    text = markdown(rows)
    assert "### digits: 4 workers of 4 samples a step, 9 steps, tau 3, iid shards; each method tuned" in text
    assert (
        "| `local` | `local` | 0.1 | 4 | 0 | 10.7 | **0.5500 ± 0.0707** | 0, 1 | +0.0 % |  | 0.5500 ± 0.0707 |" in text
    )
    co2 = r"| `co2:beta=0\|0.5` | `co2:beta=0` | 0.1 | 4 | 3 | 10.7 | diverged in 1 of 2 (else 0.4000) | 0, 1 | -20.0 %"
    assert co2 in text  # against local's 0.5 of the same seed
    assert markdown(Rows(o.rows)) == text  # from the file alone


def test_ddp_is_the_same_at_any_tau(tmp_path: Path, tiny: Task):
    o = options(tmp_path, methods=("ddp", "local"), lr_factors=(1.0,))
    search(o, rows := Rows(o.rows))
    slower = replace(o, tau=4)
    assert [p.settings.name for p in command.pending(slower, rows)] == ["local", "local"]
    assert markdown(rows).count("| `ddp` | `ddp` | 0.1 | 1 | 0 | 32 | ") == 2


def test_a_row_that_is_older_than_an_option_counts(tmp_path: Path, tiny: Task):
    o = options(tmp_path, methods=("co2:beta=0",), lr_factors=(1.0,))
    search(o, Rows(o.rows))
    old = [json.loads(line) for line in o.rows.read_text().splitlines()]
    for row in old:
        del row["options"]["wire"], row["options"]["fragments"]
    o.rows.write_text("".join(json.dumps(row) + "\n" for row in old))
    assert list(command.pending(o, Rows(o.rows))) == []


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    """A real run of digits, and its table without running anything."""
    rows = tmp_path / "rows.jsonl"
    short = ["--steps", "4", "--tau", "3", "--seeds", "0", "--lr_factors", "1", "--rows", str(rows)]
    run_script("bench.search", "--tasks", "digits", "--methods", "co2:merge=keep,delay=2", *short)
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["kind"] for row in written] == ["run", "run", "choice", "run"]  # two values of beta are tried
    assert written[-1]["split"] == "test" and written[-1]["loss"] > 0 and written[-1]["commit"]
    capsys.readouterr()
    run_script("bench.search", "--report", "--rows", str(rows))
    table = capsys.readouterr().out
    assert "### digits: 4 workers of 16 samples" in table and (tmp_path / "rows.md").read_text() == table[1:-1]
    assert len(rows.read_text().splitlines()) == 4
