"""reproduce.py --local: the small runs that stand for the paper's rows."""

import sys
from pathlib import Path

import pytest

import reproduce
from core import UserError
from results.collect import keep_stand_ins
from results.paper import TABLES
from tests.e2e.test_collect import make_run


def test_local_runs_what_is_missing_and_stops_at_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[Path] = []

    def train(arguments: list[str], cwd: Path) -> None:
        assert arguments[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        started.append(Path(arguments[arguments.index("--out") + 1]))
        if len(started) < 3:
            seed = int(started[-1].name[-1])
            make_run(tmp_path / started[-1], "language", "gpt2_pydoc_small", seed=seed, workers=4, results={})

    monkeypatch.setattr(sys, "argv", ["reproduce.py", "gap", "--local"])
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    monkeypatch.setattr(reproduce, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(reproduce.subprocess, "run", train)
    done, *_ = TABLES["gap"].rows
    folder, _ = reproduce.stand_in(done, 4, seed=0)
    make_run(tmp_path / folder, "language", "gpt2_pydoc_small", results={})
    with pytest.raises(UserError, match=r"language-gpt2_pydoc_small-co2-tau6-.*-seed0 is not finished"):
        reproduce.main()
    assert [path.name[-5:] for path in started] == ["seed1", "seed2", "seed0"], "seed 0 without penalty was there"


def test_a_kept_row_is_named_by_its_folder_and_again_repeats_it(tmp_path, monkeypatch, capsys):
    kept, runs = tmp_path / "kept", tmp_path / "runs"
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    monkeypatch.setattr(reproduce, "KEPT", kept)
    settings = {"method": "co2", "tau": 6, "seed": 0, "workers": 4, "results": {TABLES["gap"].metric.key: 2.0}}
    make_run(runs / "one", "language", "gpt2_pydoc_small", **settings)
    assert [*keep_stand_ins(["gap"], runs, kept)] and (kept / "gap.json").is_file()
    asked = ["reproduce.py", "gap", "--local", "--seeds", "0", "--dry-run"]
    monkeypatch.setattr(sys, "argv", asked)
    reproduce.main()
    other, said = capsys.readouterr().out.splitlines()
    assert said.startswith("# finished: ") and said.endswith(f"seed 0, a row of {kept}; --again repeats it")
    assert "--co2.gap none" in other, "the row without a penalty is not kept"
    monkeypatch.setattr(sys, "argv", [*asked, "--again"])
    reproduce.main()
    assert len([line for line in capsys.readouterr().out.splitlines() if "--resume" in line]) == 2


def test_a_stand_in_of_lgreco_decides_within_its_short_run():
    row = next(row for row in TABLES["lgreco_vision"].rows if row.label == "L-GreCo")
    assert row.overrides["ddp_wire.lgreco.first"] == 1256, "more steps than a stand-in has"
    ours = reproduce.stand_in_overrides(row)
    assert ours["ddp_wire.format"] == "lgreco" and ours["epochs"] == 8
    assert not any(key.endswith((".first", ".every")) for key in ours)
