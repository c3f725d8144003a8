"""A bad setting gives one line that names the value and the remedy."""

import copy
import os
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core import CO2, CO2Config, CompressionConfig, LGrecoConfig, make_method, node_mesh, save
from core.baselines import DiLoCo, DiLoCoConfig, LocalSGD, OverlapLocalSGD, SlowMo
from core.baselines.local import OverlapLocalConfig, SlowMoConfig
from core.compression.formats import UNIFORM_FORMATS
from core.groups import local_world_size
from core.hooks import Hook, Requests
from core.integrations.optimizer import attach
from core.testing.link import ThrottledLink
from tests.problems import Settings, refusal


def build(**settings: Any) -> CO2:
    return Settings(**settings).build([nn.Parameter(torch.ones(1))])


def test_settings_but_tau_are_given_by_name():
    """Their order has changed: a number in an old place would be another setting's."""
    assert CO2Config(6).tau == 6
    assert "too many positional arguments" in refusal(lambda: CO2Config(6, 0.5))  # pyright: ignore[reportCallIssue]


def params() -> list[nn.Parameter]:
    return list(nn.Linear(2, 2).parameters())


def test_a_config_with_tau_alone_is_told_which_rule_it_is():
    paper = r"^CO2Config\(tau=6\) .*CO2Config.paper\(tau=6\)"
    with pytest.warns(UserWarning, match=paper) as seen:
        CO2(params(), CO2Config(tau=6))
        CO2(params(), pickle.loads(pickle.dumps(CO2Config(6))))
    assert [warning.filename for warning in seen] == [__file__] * 2, "the user's line"
    with pytest.warns(UserWarning, match=paper):
        attach(torch.optim.SGD(ones := params(), 0.1), ones, CO2Config(6)).__enter__()


def test_a_config_that_names_its_rule_is_told_nothing():
    named = [CO2Config.paper(6), CO2Config.recommended(steps=100, tau=6), CO2Config(6, gap="norm")]
    named += [CO2Config(6, outer_momentum=0.2), *copy.deepcopy(named)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config in named:
            CO2(params(), pickle.loads(pickle.dumps(config)))
        make_method("co2", nn.Linear(2, 2), co2=CO2Config(6))  # as a train script does
    assert CO2Config.paper(6) == CO2Config(6) and CO2Config.paper() == CO2Config()
    assert CO2Config.paper(6, outer_momentum=0.2, gap="norm") == CO2Config(6, outer_momentum=0.2, gap="norm")
    assert CO2Config.recommended(steps=100, tau=6) == replace(CO2Config.recommended(steps=100), tau=6)


@pytest.mark.parametrize(
    ("tau", "steps", "momentum"),
    [(24, 1920, 0.3), (24, 1919, 0.0), (23, 10_000, 0.0), (24, None, 0.0), ("auto", 10_000, 0.0), (48, 3840, 0.3)],
)
def test_many_long_rounds_have_outer_momentum(tau: Any, steps: int | None, momentum: float):
    assert CO2Config.recommended(steps=steps, tau=tau).outer_momentum == momentum


@pytest.mark.parametrize("name", ["finished", "steps", "weight", "squares"])
def test_a_hook_cannot_take_a_name_of_the_methods_scalars(name: str):
    class Twice(Hook):
        scalars = per_worker_scalars = {"mine": 1}

    assert f"two have the name '{name}'" in refusal(lambda: CO2(params(), hooks=[Requests(name)]))
    assert "two have the name 'mine'" in refusal(lambda: CO2(params(), hooks=[Twice()]))


@pytest.mark.parametrize("method", [CO2, LocalSGD, SlowMo, DiLoCo, OverlapLocalSGD])
def test_an_option_that_no_method_has_is_refused(method: Any):
    settings = {} if method is CO2 else {"tau": 4}
    said = refusal(lambda: method(params(), **settings, bufers=1))
    own = ["mesh", "schedule", "shard", "offload"] if method is CO2 else ["tau", "compression"]
    own += ["lr"] if method is SlowMo else []
    assert said.startswith(
        f"{method.__name__}: it has no argument bufers=1 (did you mean buffers?); its arguments are"
    ), said
    assert {*own, "params", "config", "average", "timeout"} <= {*said.partition(" are ")[2].split(", ")}, said


def test_parameters_over_one_memory_are_refused():
    whole = torch.zeros(6)
    for one, other in ((whole[:4], whole[3:]), (whole, whole.view(2, 3)), (whole, whole[2:3])):
        text = refusal(lambda a=one, b=other: CO2([nn.Parameter(a), nn.Parameter(b)]))
        assert "share their memory" in text
    matrix = torch.zeros(4, 6)
    for one, other in ((whole[:3], whole[3:]), (matrix[:, :2], matrix[:, 2:])):
        CO2([nn.Parameter(one), nn.Parameter(other)])


@pytest.mark.parametrize("method", [CO2, LocalSGD, OverlapLocalSGD])
@pytest.mark.parametrize("kind", ["the parameters", "state_dict", "a part", "complex"])
def test_a_buffer_over_a_parameters_memory_is_refused_and_tied_buffers_are_not(method: Any, kind: str):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    buffers = {
        "the parameters": model.parameters(),
        "state_dict": model.state_dict().values(),
        "a part": [torch.zeros(2), model[0].weight.data[1:]],
        "complex": [torch.view_as_complex(model[1].weight.data)],
    }
    settings = {} if method is CO2 else {"tau": 4}
    text = refusal(lambda: method(model.parameters(), **settings, buffers=buffers[kind]))
    assert "shares its memory with a parameter" in text
    tied = model[1].running_mean
    method(model.parameters(), **settings, buffers=[tied, tied.view(2, 1), tied[:1]])


def test_a_worker_of_several_that_would_train_alone_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    text = refusal(lambda: CO2([nn.Parameter(torch.zeros(1))]))
    assert "WORLD_SIZE=4" in text and "init_process_group" in text


@pytest.mark.parametrize(("beta", "alpha"), [(0.5, 1.0), (0.5, 0.5), (0.0, 1.0), (0.9, 0.2)])
def test_unstable_settings_explain_the_condition(beta: float, alpha: float):
    text = refusal(lambda: build(outer_momentum=beta, outer_lr=alpha, gap="none"))
    for part in (f"outer_momentum={beta}", f"outer_lr={alpha}: ", f"diverges from {1 - beta:.3g} on"):
        assert part in text
    assert "set gap='elementwise', or lower" in text and "allow_unstable=True" in text
    build(outer_momentum=beta, outer_lr=alpha, gap="none", allow_unstable=True)
    build(outer_momentum=beta, outer_lr=alpha)
    shared = CO2Config(outer_momentum=beta, outer_lr=alpha, gap="none")
    assert text == refusal(lambda: CO2([nn.Parameter(torch.ones(1))], shared))


def test_settings_below_the_boundary_or_without_delay_need_no_penalty():
    build(outer_momentum=0.5, outer_lr=0.49, gap="none")
    build(outer_momentum=0.5, outer_lr=1.0, gap="none", delay=0)


def test_defaults_are_those_of_the_released_example():
    c = CO2Config()
    assert (c.tau, c.outer_lr, c.outer_momentum, c.clip, c.gap) == (48, 1.0, 0.5, 1.0, "elementwise")
    assert (c.merge, c.delay, c.is_a_round_late) == ("restart", "boundary", True)  # the paper's order


def test_thawing_a_frozen_parameter_is_refused_at_the_boundary():
    trained, frozen = (nn.Parameter(torch.zeros(1), requires_grad=r) for r in (True, False))
    co2 = CO2([trained, frozen], CO2Config(tau=1))
    co2.step()
    frozen.requires_grad_(True)
    assert "requires a gradient" in refusal(co2.step)


AUTO, INT8, LGRECO = CompressionConfig("auto"), CompressionConfig("int8"), CompressionConfig("lgreco", like="int4")
PARTS: dict[str, Any] = {"tau": 6, "gap": "none", "merge": "keep_local", "outer_momentum": 0.0, "delay": 1}
REFUSED: list[Any] = [
    (lambda: CO2Config.recommended(steps=80, tau=96), "tau=96 with steps=80", "a smaller tau"),
    (lambda: node_mesh(2, "cpu"), "node_mesh(2, 'cpu')", "give cuda or cpu, then the number of ranks"),  # pyright: ignore
    (lambda: save("x", None, nn.Linear(1, 1), None, step=1), "save('x', NoneType, Linear", "in this order"),  # pyright: ignore
    (lambda: CO2Config(tau=0), "tau=0", "1 or more"),
    (lambda: CO2Config(outer_lr=0.0), "outer_lr=0.0", "above 0"),
    (lambda: CO2Config(outer_momentum=1.0), "outer_momentum=1.0", "[0, 1)"),
    (lambda: CO2Config(gap="element"), "gap='element'", "elementwise, norm, none"),
    (lambda: CO2Config(clip=0.0), "clip=0.0", "None for no clipping"),
    (lambda: CO2Config(compression="int8"), "compression='int8'", "CompressionConfig('int8')"),
    (lambda: CO2Config(outlier="far"), "outlier='far'", "None for no limit"),
    (lambda: CO2Config(tau="automatic"), "tau='automatic'", "a whole number of local steps, 1 or more, or auto"),
    (lambda: CO2Config(tau="auto", tau_max=0), "tau_max=0"),
    (lambda: build(delay=0), "delay=0", "set gap none"),
    (lambda: build(delay=0, gap="none", tau="auto"), "delay=0", "boundary or auto"),
    (lambda: build(merge="own"), "merge='own'", "restart, keep_local"),
    (lambda: build(delay=3), "delay=3", "with it give delay boundary or 0, or set merge keep_local"),
    (lambda: build(delay="auto"), "delay='auto'", "set merge keep_local"),
    (lambda: build(delay=49, merge="keep_local"), "delay=49", "at most tau=48"),
    (lambda: build(delay="soon", merge="keep_local"), "delay='soon'", "boundary, auto, or"),
    (lambda: build(delay=3, merge="keep_local", tau="auto"), "delay=3", "boundary or auto"),
    (lambda: SlowMoConfig(outer_lr=0.0), "outer_lr=0.0", "above 0"),
    (lambda: CompressionConfig("lgreco", like=4), "compression.like=4", "int4"),  # pyright: ignore
    (lambda: OverlapLocalConfig(pull=0.0), "pull=0.0", "(0, 1]"),
    (lambda: OverlapLocalSGD(params(), "auto"), "tau='auto'", "give another method a number"),  # pyright: ignore
    (lambda: ThrottledLink(0), "link rate 0", "above 0"),
    (lambda: make_method("sgd", nn.Linear(1, 1)), "'sgd'", "co2, ddp, diloco, local, overlap_local, slowmo"),
    (
        lambda: make_method("co2", nn.Linear(1, 1), diloco=DiLoCoConfig(outer_lr=0.5)),
        "diloco.outer_lr=0.5",
        "leave it out",
    ),
    (lambda: CO2([]), "got no parameters", "an exhausted generator or an empty list"),
    (lambda: CO2(iter(()), shard=True), "got no parameters", "each pipeline stage needs one"),
    (lambda: CO2(params(), model_params=iter(())), "got no model_params (", "give model.parameters() anew"),
    (lambda: CO2([nn.Parameter(torch.zeros(1), requires_grad=False)]), "no parameter", "nothing to train"),
    (lambda: CO2([torch.zeros(1, dtype=torch.complex64, requires_grad=True)]), "complex64", "floating"),
    (lambda: LocalSGD(params(), tau=0), "tau=0: give a whole number of local steps, 1 or more"),
    *(
        (lambda make=make: make(nn.Sequential(nn.Linear(2, 2))), "one Sequential is given: give model.parameters()")
        for make in (CO2, lambda given: CO2(given, shard=True), lambda given: LocalSGD(given, 2))
    ),
    (lambda: CO2(nn.Linear(2, 2).weight), "parameters: one Parameter is given: "),
    (lambda: CO2(nn.Linear(2, 2).named_parameters()), "parameters: a tuple is among them: "),  # pyright: ignore
    (lambda: CO2([*params(), None]), "parameters: a NoneType is among them: "),  # pyright: ignore
    (lambda: attach(nn.Linear(1, 1), params()).__enter__(), "optimizer: a Linear is given: give a torch optimizer"),  # pyright: ignore
    (lambda: local_world_size({"SLURM_TASKS_PER_NODE": "8(x2),4"}), "=8(x2),4: start equally many on each node"),
    (lambda: CO2(params(), model_params=nn.Linear(1, 1)), "one Linear", "give model.parameters()"),  # pyright: ignore
    (lambda: CO2(params(), model_params=[torch.ones(2)]), "1 model_params for 2 parameters", "one of each shape"),
    (lambda: CO2(params(), buffers=[torch.ones(1).expand(3)]), "shape (3,) is expanded", "clone()"),
    (lambda: CO2Config(compression="int4"), "compression='int4'", "such as CompressionConfig('int4')"),  # pyright: ignore
    (lambda: CO2(params(), 48), "config=48: give an object of CO2Config"),
    (lambda: make_method("co2", params()), "give the module itself"),
    (lambda: CO2(params(), buffers=None), "buffers: one NoneType is given"),
    (lambda: CO2(params(), mesh=(2, 2)), "mesh=(2, 2): give a DeviceMesh"),
    (lambda: CO2(params(), hooks=Requests("stop")), "give a list"),
    (lambda: CO2(params(), hooks=[Requests]), "is among them"),
    (lambda: Requests("stop").ask("pause"), "ask('pause')"),
    (lambda: DiLoCo(params(), 4, CO2Config()), "give an object of DiLoCoConfig, or leave it out"),  # pyright: ignore
    (lambda: DiLoCo(params(), 4, DiLoCoConfig(outer_lr=0.0)), "outer_lr=0.0", "above 0"),
    (lambda: [CO2(params(), hooks=[hook]) for hook in [Requests("stop")] * 2], "make one for each"),
    (lambda: CO2(params(), CO2Config(compression=LGRECO), shard=True), "no worker owns part of"),
    (lambda: CO2Config(fragments=0), "fragments=0", "give a whole number"),
    (lambda: CO2Config(**PARTS | {"fragments": 2, "merge": "restart", "delay": 0}), "keep_local"),
    (lambda: CO2Config(**PARTS | {"fragments": 7}), "fragments=7", "give at most tau=6"),
    (lambda: CO2Config(**PARTS | {"fragments": 3, "delay": 3}), "one all-reduce is in flight at a time"),
    (lambda: CompressionConfig("fp8"), "compression.format='fp8'", ", ".join([*UNIFORM_FORMATS, "lgreco", "auto"])),  # pyright: ignore
    (lambda: CompressionConfig("int4").check([torch.zeros(3), torch.zeros(3, device="meta")], None), "on cpu, meta: "),
    (lambda: CompressionConfig("lgreco"), "compression.like='': give int2"),
    (lambda: CompressionConfig("lgreco", like="int7"), "compression.like='int7': give int2"),
    (lambda: CompressionConfig("lgreco", like="top0.7"), "compression.like='top0.7': give"),
    (lambda: CompressionConfig("lgreco", like="rank0"), "such as rank4"),
    (lambda: CompressionConfig("lgreco", like="rank2.5"), "compression.like='rank2.5'"),
    (lambda: CompressionConfig("lgreco", like="rank" + 400 * "9"), "such as rank4"),
    (lambda: CompressionConfig("int4", like="int4"), "compression.like='int4' belongs to", "lgreco, not int4"),
    (lambda: CompressionConfig("int4", lgreco=LGrecoConfig(every=3)), "belongs to compression.format lgreco, not"),
    (lambda: LGrecoConfig(rule="best"), "compression.lgreco.rule='best': "),  # pyright: ignore
    (lambda: LGrecoConfig(rule=5), "compression.lgreco.rule=5: "),  # pyright: ignore
    (lambda: LGrecoConfig(every=0), "compression.lgreco.every=0: "),
    (lambda: LGrecoConfig(first=1.5), "compression.lgreco.first=1.5: "),  # pyright: ignore
    (lambda: LGrecoConfig(first=True), "compression.lgreco.first=True: "),
    *(
        (lambda n=n: make_method(n, nn.Linear(1, 1), ddp_compression=INT8), "'int8' is method ddp's own")
        for n in ("co2", "local", "slowmo")
    ),
    (lambda: make_method("ddp", nn.Linear(1, 1), ddp_compression=AUTO), "format='auto' is CO2's own choice, from"),
    (lambda: make_method("ddp", nn.Linear(1, 1), co2=CO2Config(compression=LGRECO)), "set ddp_compression"),
    *(
        (lambda n=n: make_method(n, nn.Linear(1, 1), co2=CO2Config(3, compression=AUTO)), "'auto' is CO2's own choice")
        for n in ("local", "slowmo", "overlap_local")
    ),
    (lambda: CO2(params(), schedule=lambda number: None), "gives None for round 0: return a dict"),  # pyright: ignore
    (lambda: CO2(params(), schedule=lambda n: {"gap": "norm"}), "the schedule changes gap: only tau, outer_lr"),
    (lambda: CO2(params(), CO2Config("auto"), schedule=lambda n: {"tau": 3}), "give numbers, or only auto"),
    (lambda: CO2(params(), timeout=-1), "timeout=-1: give seconds, above 0"),
    (lambda: CO2Config.recommended(steps=2e4), "steps=20000.0: give a whole number"),  # pyright: ignore
    (lambda: CO2Config.recommended("4"), "workers='4': give a whole number"),  # pyright: ignore
    (lambda: CO2Config.recommended(compression="int4"), "no argument compression='int4'; its arguments are workers, "),  # pyright: ignore
    (lambda: CO2Config(taus=4), "CO2Config: it has no argument taus=4 (did you mean tau?)", ", merge, "),  # pyright: ignore
    (lambda: CO2Config.paper(4, clips=1), "CO2Config: it has no argument clips=1 (did you mean clip?)"),
    (lambda: CompressionConfig(formt="int4"), "(did you mean format?)"),  # pyright: ignore
    (lambda: make_method("local", nn.Linear(1, 1), slowmoo=None), "slowmoo=None (did you mean slowmo?)", "average"),
    *(
        (lambda make=make: make(params()), f"{make.__name__}: missing a required argument: 'tau'")
        for make in (LocalSGD, SlowMo, DiLoCo, OverlapLocalSGD)
    ),
    (lambda: LocalSGD(params(), CO2Config(4)), "tau=<CO2Config>: give a whole number of local steps"),  # pyright: ignore
    (lambda: node_mesh("gpu"), "node_mesh('gpu', None): give cuda or cpu"),
    (lambda: node_mesh("cpu", 0), "node_mesh('cpu', 0): give cuda or cpu, then the number"),
    (lambda: CO2(params(), CO2Config(4), schedule=3), "schedule=3: give a function"),  # pyright: ignore
]
"""What is built, and parts of the one line that refuses it."""


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[1])
def test_bad_settings_and_what_is_of_another_kind_are_refused(case: Any):
    make, *parts = case
    text = refusal(make)
    assert all(part in text for part in parts), text


# -- a mistake that nobody catches ------------------------------------------------------------------------------------

SCRIPT = """
import os, threading
import torch.distributed as dist
from core import CO2Config, CollectiveError

def bug():
    raise KeyError("a bug")

def mistake():
    CO2Config(tau=0)

def lost():
    raise CollectiveError("rank 1 is gone")

if "RANK" in os.environ:
    dist.init_process_group("gloo")
for act in (bug, lost, mistake):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
mistake()
"""


@pytest.mark.parametrize(
    "how", ["plain", *(pytest.param(how, marks=pytest.mark.slow) for how in ("asked", "torchrun"))]
)
def test_an_uncaught_mistake_is_one_line_of_the_users_script(how: str, tmp_path: Path):
    """In a thread and at the end, under torchrun once. A bug keeps its traceback, and CO2_TRACEBACK brings back all."""
    (script := tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    env.pop("CO2_LAUNCH", None)  # of a launcher that another test has run in this process
    env |= {"CO2_TRACEBACK": "1"} if how == "asked" else {}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if how == "torchrun" else []
    done = subprocess.run([sys.executable, *launcher, script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "KeyError: 'a bug'" in done.stderr, done.stderr
    said = [line for line in done.stderr.splitlines() if "error: tau=0: " in line]
    assert len(said) == {"plain": 2, "asked": 0, "torchrun": 1}[how], done.stderr
    assert done.stderr.count(f"error: rank 1 is gone ({script}, line 13)\n") == (how != "asked"), done.stderr
    assert all(line.endswith(f" ({script}, line 10)") for line in said), said
    assert done.stderr.count(f'File "{script}", line 10') == (2 if how == "asked" else 0), done.stderr
