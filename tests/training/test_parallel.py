"""Models under a layout are the model in one process: losses, norms and parameters; CO2 between islands is the
reference's; a checkpoint of one layout goes on under another."""

from pathlib import Path
from typing import Any

import pytest

from core import CO2Config
from core.testing import run_distributed
from tests import layouts
from tests.problems import run_cases
from training.layout import Layout

CLIP = 0.5
TAU, ROUNDS, STEPS = 3, 2, 3
CONFIGS = [CO2Config(TAU, outer_momentum=0.4, gap=g, clip=c) for g, c in [("elementwise", None), ("norm", 0.02)]]
KEEP = CO2Config(TAU, outer_momentum=0.4, gap="none", merge="keep_local", delay=2)
FACTORS = [f"tp{t}.pp{p}.dp{8 // (t * p)}" for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if t * p <= 8]
SHARED_OUT = ["pp2.dp4.fsdp", "tp2.dp4.fsdp", "tp2.pp2.dp2.fsdp", "tp2.pp2.dp2.zero2", "pp2.dp4.zero1", "dp8.zero1"]
MORE = ["pp4.v2.mb4.dp2", "tp2.pp2.v2.mb4.dp2", "pp2.v4.mb2.dp4.fsdp", "pp2.dp2.mb4.tp2", "dp8.fsdp.mb2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "names"), [("gpt2", FACTORS), ("llama", SHARED_OUT), ("llama", MORE)], ids=["factors", "shared", "more"]
)
def test_every_factorisation_of_eight_ranks_is_one_process(kind: str, names: list[str]):
    results = run_distributed(layouts.train, 8, kind, names, STEPS, CLIP, timeout=900)
    expected = layouts.one_process(kind, STEPS, CLIP)
    worst = {name: layouts.worst([*traces], expected) for name, *traces in zip(names, *results, strict=True)}
    assert not {name: error for name, error in worst.items() if error >= 1e-10}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config"),
    [*(("gpt2-short", config) for config in CONFIGS), ("llama-short", CONFIGS[0]), ("llama-tied-short", CONFIGS[1])],
    ids=["gpt2, elementwise", "gpt2, norm", "llama, elementwise", "tied llama, norm"],
)
@pytest.mark.parametrize(
    "names", [["tp2", "pp2"], ["pp4", "tp2.pp2", "pp2.dp2", "tp2.dp2", "pp2.dp2.fsdp", "tp2.dp2.fsdp"]], ids=["2", "4"]
)
def test_co2_between_islands_is_the_reference(names: list[str], kind: str, config: CO2Config):
    layout, steps = [f"{name}.co2x2" for name in names], ROUNDS * TAU + 1
    devices = Layout.parse(layout[0]).devices
    results = run_distributed(layouts.islands, devices, kind, layout, config, steps, timeout=900)
    expected = layouts.reference(kind, config, steps)
    for name, *of_ranks in zip(names, *results, strict=True):
        assert layouts.difference([trace for trace, _ in of_ranks], expected) < 1e-10, name
        assert all(stats["drifted"] == 0 for _, rounds in of_ranks for stats in rounds), name


CHAINS: list[tuple[CO2Config | None, list[str]]] = [
    (
        CONFIGS[0],
        ["tp4.co2x2", "pp4.co2x2", "pp2.dp2.fsdp.co2x2", "pp2.v2.dp2.co2x2", "dp4.fsdp.co2x2", "tp2.pp2.co2x2"],
    ),
    (CONFIGS[1], ["tp2.co2x2", "pp2.co2x2", "tp2.co2x2"]),  # whose gap is a norm over all ranks' shares
    (KEEP, ["tp2.co2x2", "pp2.co2x2", "dp2.co2x2"]),  # whose change in flight is an island's own
    (None, ["tp2.pp2.dp2.fsdp", "pp4.dp2", "dp8.zero1", "dp8", "tp4.pp2"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "names"), CHAINS, ids=[names[0] for _, names in CHAINS])
def test_a_checkpoint_goes_on_under_another_layout(config: CO2Config | None, names: list[str], tmp_path: Path):
    """CO2's state included: as the run that stayed under the first. A round and a step on each layout."""
    steps, devices = TAU + 1, Layout.parse(names[0]).devices
    ours = run_distributed(layouts.chained, devices, "gpt2-short", names, config, steps, tmp_path / "a", timeout=900)
    stayed = [names[0]] * len(names)
    whole: dict[str, Any] = {}
    for params in run_distributed(
        layouts.chained, devices, "gpt2-short", stayed[:1], config, len(names) * steps, tmp_path / "b", timeout=900
    ):
        whole |= params
    assert layouts.difference([[params] for params in ours], [whole]) < 1e-10


@pytest.mark.slow
def test_fragments_go_on_under_a_layout_that_cuts_them_elsewhere(tmp_path: Path):
    """Without momentum, the end does not depend on which elements travel together. The change in flight is merged
    where it belongs, and each fragment counts its own momentum."""
    names = ["dp2.co2x2", "dp2.fsdp.co2x2", "tp2.co2x2"]  # the last cuts nothing
    cases = [(names, "co2x4", momentum, tmp_path / str(momentum)) for momentum in (0.0, 0.3)]
    without, with_momentum = run_cases(layouts.resliced, 4, cases, timeout=200)
    whole: dict[str, Any] = {}
    for ((params, _), *_), _ in without:
        whole |= params
    for (_, *moved), refused in without:
        assert all((p - whole[name]).abs().max() < 1e-10 for params, _ in moved for name, p in params.items())
        assert "islands of 2, here they are of 1: an island of one device holds another state" in refused
    for ((_, before), *moved), _ in with_momentum:  # else it is not saved
        assert [after for _, after in moved] == pytest.approx([before] * len(moved), rel=1e-12) and before > 0
