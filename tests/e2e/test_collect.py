"""The tables that are made from run folders, checked by hand."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import reproduce
from core import UserError
from results.collect import collect, keep_stand_ins, load_recipe, read_kept, read_run, status
from results.paper import SHORT, TABLES


def make_run(folder: Path, task: str, name: str, *, results: dict[str, Any], workers: int = 128, **changes) -> None:
    """A finished run of a recipe, as training/run.py leaves it; of four workers: of a table's stand-in."""
    co2 = {key: changes.pop(key) for key in ("tau", "gap") if key in changes}
    recipe = load_recipe(task, name)
    recipe = replace(recipe, co2=replace(recipe.co2, **co2, allow_unstable="gap" in co2), out=folder, **changes)
    folder.mkdir(parents=True)
    config: dict[str, Any] = {"recipe": asdict(recipe), "world_size": workers, "commit": "abc1234"}
    for key, value in SHORT[task].items() if workers == 4 else ():
        *above, last = key.split(".")
        (config["recipe"][above[0]] if above else config["recipe"])[last] = value
    (folder / "config.json").write_text(json.dumps(config, default=str))
    summary = {"steps": 100, "steps_per_second": 2.0, "hidden_share": 0.9} | results
    (folder / "summary.json").write_text(json.dumps(summary))


def resnet50(folder: Path, top1: float, **changes: Any) -> None:
    make_run(folder, "vision", "imagenet_resnet50", results={"test_top1": top1}, **changes)


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Of a run's config.json."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def collected(folder: Path, *names: str) -> list[str]:
    tables = {name: TABLES[name] for name in names} or TABLES
    return list(collect(tables, folder))


def test_mean_and_deviation_over_seeds_beside_the_papers_value(tmp_path: Path):
    for seed, top1, rate in ((0, 0.75, 2.0), (1, 0.76, 3.0), (2, 0.80, 4.0)):  # deviations -2, -1, 3: sd^2 = 14 / 2
        results = {"test_top1": top1, "steps_per_second": rate, "hidden_share": 0.9 + seed / 100}
        make_run(tmp_path / "x" / str(seed), "vision", "imagenet_resnet50", seed=seed, results=results)
    lines = collected(tmp_path, "imagenet")
    head = "| model | method | tau | workers | batch | seeds | top-1, % | samples/s | exposed | paper |"
    assert lines[2].startswith(head)
    measured = "| ResNet-50 | co2 | 48 | 128 | 8192 | 3 | 77.00 ± 2.65 | 24,576.0 | 9.0% | 77.14 ± 0.09 |"
    assert measured in lines and sum(line.startswith("| ResNet-50 | co2 |") for line in lines) == 1
    assert "| ResNet-50 | ddp |  |  |  |  | not run |  |  | 76.92 ± 0.05 |" in lines
    assert "| Swin-T | slowmo |  |  |  |  | not run |  |  |  |" in lines, "the paper's value is unknown: empty"
    assert "Commits: abc1234." in lines and not any("Not counted" in line for line in lines)


def test_one_seed_has_no_deviation_and_other_taus_and_worlds_have_their_own_lines(tmp_path: Path):
    resnet50(tmp_path / "a", 0.75)
    resnet50(tmp_path / "b", 0.70, tau=24, seed=1)
    resnet50(tmp_path / "c", 0.65, workers=80, batch_size=8160)
    rows = [line for line in collected(tmp_path, "imagenet") if line.startswith("| ResNet-50 | co2 |")]
    assert [row.split(" | ")[2:7] for row in rows] == [
        ["24", "128", "8192", "1", "70.00"],
        ["48", "80", "8160", "1", "65.00"],
        ["48", "128", "8192", "1", "75.00"],
    ]


def test_runs_that_are_no_fair_measurement_are_left_out_with_the_reason(tmp_path: Path):
    resnet50(tmp_path / "a", 0.75)
    resnet50(tmp_path / "again", 0.76)
    resnet50(tmp_path / "short", 0.77, epochs=9)
    resnet50(tmp_path / "no_penalty", 0.78, gap="none")
    make_run(tmp_path / "stopped", "vision", "imagenet_resnet50", results={"test_top1": 0.79, "stopped_by_signal": 10})
    make_run(tmp_path / "cifar", "vision", "cifar10_small", results={"test_top1": 0.8})
    make_run(tmp_path / "metricless", "vision", "imagenet_resnet50", seed=3, results={})
    resnet50(tmp_path / "unfinished", 0.81)
    (tmp_path / "unfinished" / "summary.json").unlink()
    resnet50(tmp_path / "damaged", 0.82)
    (tmp_path / "damaged" / "config.json").write_text("{")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('["of another program"]')
    (tmp_path / "foreign" / "summary.json").write_text("{}")
    lines = collected(tmp_path)
    assert sum("75.00" in line for line in lines) == 5  # its own table, wire formats, tau, clip, L-GreCo
    assert not any(f"{value}.00" in line for value in range(76, 83) for line in lines)
    for name, reason in {
        "again": "seed 0 is there already",
        "short": "epochs=9 in place of 90",
        "no_penalty": "co2.allow_unstable=True in place of False, co2.gap=none in place of elementwise",
        "stopped": "it was stopped at step 100",
        "cifar": "no row trains cifar10_small with co2",
        "metricless": "no test_top1 in summary.json",
        "unfinished": "it has no summary.json: not finished",
    }.items():
        assert f"Not counted: {tmp_path / name}: {reason}." in lines
    for name in ("damaged", "foreign"):
        start = f"Not counted: {tmp_path / name}: config.json or summary.json is damaged"
        assert any(line.startswith(start) for line in lines)


def test_a_resumed_run_has_the_commits_of_all_its_parts_and_an_extended_one_is_no_measurement(tmp_path: Path):
    resnet50(tmp_path / "a", 0.75)
    history = [{"changed": [], "step": 10, "commit": commit} for commit in ("abc1234", "def5678")]
    edit(tmp_path / "a", lambda config: config.update(history=history))
    assert "Commits: abc1234, def5678." in collected(tmp_path, "imagenet")
    edit(tmp_path / "a", lambda config: config["recipe"].update(extend=True))
    lines = collected(tmp_path, "imagenet")
    assert f"Not counted: {tmp_path / 'a'}: extend=True in place of False." in lines
    assert "| ResNet-50 | co2 |  |  |  |  | not run |  |  | 77.14 ± 0.09 |" in lines


@pytest.mark.parametrize("wrong", [None, "x", -1.5, [1], {"a": 1}, True, float("inf")])
def test_values_of_other_types_are_damage(tmp_path: Path, wrong: Any):
    places = [("config.json", "world_size"), ("config.json", "commit"), ("config.json", "recipe")]
    keys = ("name", "method", "seed", "batch_size", "co2", "pretrained")
    places += [("config.json", f"recipe.{key}") for key in keys]
    places += [("summary.json", key) for key in ("steps_per_second", "hidden_share", "test_top1", "steps")]
    for number, (file, place) in enumerate(places):
        resnet50(folder := tmp_path / str(number), 0.75)
        content = json.loads((folder / file).read_text())
        *above, key = place.split(".")
        (content[above[0]] if above else content)[key] = wrong
        (folder / file).write_text(json.dumps(content))
    told = "\n".join(collected(tmp_path))
    assert "Not counted" in told and "Commits: " in told


def test_names_of_several_lines_are_told_in_one(tmp_path: Path):
    """What a run folder is called, or holds, makes no line and no colour of its own."""
    for name in ("a\n| ResNet-50 | co2 | 48 | 128 |", "b\x1b[31m", "c\u2028d", "\udcff"):
        resnet50(tmp_path / name, 0.75, epochs=3)
    resnet50(tmp_path / "good", 0.75)
    edit(tmp_path / "good", lambda config: config.update(commit="abc\n# none\x1b"))
    lines = collected(tmp_path)
    assert all(line.isprintable() for line in lines)
    assert f"Not counted: {tmp_path}/a\\n| ResNet-50 | co2 | 48 | 128 |: epochs=3 in place of 90." in lines
    assert f"Not counted: {tmp_path}/b\\x1b[31m: epochs=3 in place of 90." in lines
    assert "Commits: abc\\n# none\\x1b." in lines


def test_a_run_older_than_a_field_had_its_default(tmp_path: Path):
    """What the recipe itself sets otherwise by now is a departure still."""
    make_run(tmp_path / "vit", "vision", "imagenet_vit_base", results={"test_top1": 0.8})
    resnet50(tmp_path / "resnet", 0.75)
    for name in ("vit", "resnet"):
        for key in ("repeats", "elastic"):
            edit(tmp_path / name, lambda config, key=key: config["recipe"].pop(key))
        edit(tmp_path / name, lambda config: config["recipe"]["co2"].pop("outlier"))
    lines = collected(tmp_path, "imagenet")
    assert any(line.startswith("| ResNet-50 | co2 | 48 |") and "75.00" in line for line in lines)
    assert f"Not counted: {tmp_path / 'vit'}: repeats=1 in place of 3." in lines


def test_a_run_with_a_setting_that_is_gone_counts_where_it_trained_as_without(tmp_path: Path):
    for name, sync_steps in (("plain", 0), ("synchronised", 6)):
        resnet50(tmp_path / name, 0.75)
        gone = {"co2": {"sync_steps": sync_steps, "update": "fast"}, "delayed": {"taylor": 0.25}}
        gone["slowmo"] = {"outer_lr": 0.9}  # another method's: defaults of these may change
        for key, settings in gone.items():
            edit(tmp_path / name, lambda config, key=key, of=settings: config["recipe"][key].update(of))
        edit(tmp_path / name, lambda config: config["recipe"].update(schedule=[]))
    lines = collected(tmp_path, "imagenet")
    assert any(line.startswith("| ResNet-50 | co2 | 48 |") and "75.00" in line for line in lines)
    assert f"Not counted: {tmp_path / 'synchronised'}: co2.sync_steps=6 in place of None." in lines


def test_a_backbone_counts_by_its_name_wherever_it_lies(tmp_path: Path):
    name = "resnet50_v1c-2cccc1ad.pth"
    for folder, path in (("a", name), ("b", f"/weights/{name}"), ("c", "/weights/other.pth"), ("d", None)):
        given = {"pretrained": path and Path(path), "seed": "abcd".index(folder)}
        make_run(tmp_path / folder, "segmentation", "ade20k_resnet50", results={"val_mIoU": 40.0}, **given)
    lines = collected(tmp_path, "ade20k")
    (row,) = [line for line in lines if line.startswith("| ResNet-50 | co2 |") and "40.00" in line]
    assert row.split(" | ")[5] == "2"
    assert f"Not counted: {tmp_path / 'c'}: pretrained=other.pth in place of {name}." in lines
    assert f"Not counted: {tmp_path / 'd'}: pretrained=None in place of {name}." in lines


def test_segmentations_rows_say_whose_images_share_statistics(tmp_path: Path):
    """Of a node's GPUs under every method, but for the rows of which the label says otherwise."""
    settings = {"node": ("co2", "ddp"), "no": ("co2", "ddp"), "all": ("ddp",), True: ("co2",)}
    for value, methods in settings.items():
        for method in methods:
            given = {"method": method, "sync_bn": value, "results": {"val_mIoU": 40.0 + list(settings).index(value)}}
            make_run(tmp_path / f"{method}-{value}", "segmentation", "ade20k_resnet50", **given)
    lines = collected(tmp_path, "ade20k")
    found = {tuple(line[2:].split(" | ")[:2]): line for line in lines if "not run" not in line and "ResNet-50" in line}
    mIoU = {key: line.split(" | ")[6] for key, line in found.items()}
    assert mIoU == {
        ("ResNet-50", "ddp"): "40.00",
        ("ResNet-50", "co2"): "40.00",
        ("ResNet-50 without SyncBN", "ddp"): "41.00",
        ("ResNet-50 without SyncBN", "co2"): "41.00",
        ("ResNet-50 with SyncBN over all", "ddp"): "42.00",
    }
    assert f"Not counted: {tmp_path / 'co2-True'}: sync_bn=True in place of node." in lines
    assert any(line.startswith("SyncBN shares BatchNorm's statistics over the images of a node") for line in lines)


def test_settings_of_unused_methods_and_of_the_loader_do_not_matter(tmp_path: Path):
    resnet50(tmp_path / "a", 0.75, method="ddp", tau=3, loader_workers=2, eval_every=7)
    (line,) = [line for line in collected(tmp_path, "imagenet") if line.startswith("| ResNet-50 | ddp |")]
    assert line == "| ResNet-50 | ddp |  | 128 | 8192 | 1 | 75.00 | 16,384.0 | 10.0% | 76.92 ± 0.05 |"


def test_a_run_without_the_penalty_goes_to_its_own_row(tmp_path: Path):
    for folder, changes in (("with", {}), ("without", {"gap": "none"})):
        results = {"val_perplexity": 20.0 if changes else 10.0}
        sizes = {"workers": 64, "batch_size": 512}
        make_run(tmp_path / folder, "language", "gpt2_small_owt", results=results, **sizes, **changes)
    lines = collected(tmp_path, "gap")
    assert "| without | co2 | 48 | 64 | 512 | 1 | 20.00 | 1,024.0 | 10.0% | 7.56 |" in lines
    assert "| with | co2 | 48 | 64 | 512 | 1 | 10.00 | 1,024.0 | 10.0% | 7.39 |" in lines
    assert any("| 10.00 |" in line for line in collected(tmp_path, "gpt2")), "the same run is a row of another table"


def test_a_row_of_64_gpus_takes_no_run_of_128(tmp_path: Path):
    make_run(tmp_path / "a", "language", "gpt2_small_owt", workers=128, batch_size=512, results={"val_perplexity": 9.0})
    assert f"Not counted: {tmp_path / 'a'}: 128 workers in place of 64." in collected(tmp_path, "gpt2")


def test_stand_ins_have_a_table_of_their_own_without_the_papers_values(tmp_path: Path):
    make_run(tmp_path / "a", "vision", "digits_small", workers=4, results={"test_top1": 0.9})
    lines = collected(tmp_path, "imagenet")
    assert "| ResNet-50: digits_small | co2 | 6 | 4 | 64 | 1 | 90.00 |" in lines
    assert "| ViT-Base: digits_vit | co2 |  |  |  |  | not run |" in lines
    assert "| ResNet-50 | co2 |  |  |  |  | not run |  |  | 77.14 ± 0.09 |" in lines


def kept_in(out: Path, names: list[str], folder: Path) -> str:
    return "\n".join(keep_stand_ins(names, folder, out))


def test_stand_ins_are_kept(tmp_path: Path):
    make_run(tmp_path / "runs/a", "vision", "digits_small", workers=4, results={"test_top1": 0.9})
    make_run(tmp_path / "runs/of_tau_vision", "vision", "digits_small", workers=4, tau=12, results={"test_top1": 0.8})
    shown = kept_in(tmp_path / "tables", ["imagenet"], tmp_path / "runs")
    (kept,) = json.loads((tmp_path / "tables/imagenet.json").read_text())
    assert (kept["settings"]["name"], kept["test_top1"], kept["commit"]) == ("digits_small", 0.9, "abc1234")
    assert "| ResNet-50: digits_small | co2 | 6 | 4 | 64 | 1 | 90.00 |" in shown


def test_what_is_kept_counts_without_its_run_folders_and_runs_of_today_go_beside_it(tmp_path: Path):
    small = {"task": "vision", "name": "digits_small", "workers": 4}
    make_run(tmp_path / "first/a", **small, results={"test_top1": 0.9})
    make_run(tmp_path / "first/other", **small, gap="none", results={"test_top1": 0.1})  # counts in no row of imagenet
    out = tmp_path / "tables"
    before = kept_in(out, ["imagenet"], tmp_path / "first")
    assert kept_in(out, ["imagenet"], tmp_path / "nothing") == before
    make_run(tmp_path / "later/b", **small, seed=1, results={"test_top1": 0.8})
    make_run(tmp_path / "later/a", **small, results={"test_top1": 0.7})  # again: it replaces the first
    shown = kept_in(out, ["imagenet", "tau_vision"], tmp_path / "later")
    for label in ("ResNet-50", "tau 6"):  # tables share runs
        assert f"| {label}: digits_small | co2 | 6 | 4 | 64 | 2 | 75.00 ± 7.07 |" in shown
    (out / "gap.json").write_text('[{"folder": "a"}]')
    with pytest.raises(UserError, match=r"gap.json is damaged"):
        kept_in(out, ["imagenet"], tmp_path / "later")


def test_a_kept_run_is_finished_for_its_row_and_seed_alone(tmp_path: Path):
    make_run(tmp_path / "runs/a", "vision", "digits_small", workers=4, seed=2, results={"test_top1": 0.9})
    kept_in(tmp_path, ["imagenet"], tmp_path / "runs")
    row = next(row for row in TABLES["imagenet"].rows if (row.local, row.method) == ("digits_small", "co2"))
    jobs = [reproduce.Job(of, seed, Path("nowhere"), {}, []) for of in (row, replace(row, tau=12)) for seed in (1, 2)]
    kept = read_kept(tmp_path)
    assert [(job.row.tau, job.seed) for job in reproduce.unfinished(jobs, kept)] == [(None, 1), (12, 1), (12, 2)]
    told = list(status({"imagenet": [(job.row, job.seed, tmp_path / str(job.seed)) for job in jobs]}, "worker", kept))
    assert "| imagenet | ResNet-50 | co2 |  | 1 | 0 | 1 | 0.0 | ? |" in told
    assert "| imagenet | ResNet-50 | co2 | 12 | 0 | 0 | 2 | 0.0 | ? |" in told


def test_throughput_and_its_ratios_by_hand(tmp_path: Path):
    for nodes, rate in ((1, 4.0), (2, 2.0), (16, 1.0)):  # steps of 32, 64 and 512 samples of 1,024 tokens
        changes = {"epochs": 1, "batch_size": 32 * nodes, "tau": 12, "workers": 8 * nodes}
        results = {"val_perplexity": 9.0, "steps_per_second": rate}
        make_run(tmp_path / f"a-tcp-{nodes}", "language", "gpt2_large_owt", results=results, **changes)
    lines = collected(tmp_path, "throughput")
    assert "| 16 GPUs | co2 | 12 | 16 | 64 | 1 | 131,072 | 128.0 | 10.0% |  |" in lines
    assert "| co2 | 12 | 0.50 | 0.25 | 0.86 |" in lines  # 512 / (8 x 128), 512 / (16 x 128)
    assert "| ddp |  | not run | not run | 0.82 |" in lines
    assert "| 128 GPUs | co2 | 48 | 128 |  |  | not run |  |  | 304,736 |" in lines
    assert "| slowmo | 48 | not run | not run |  |" in lines
    other = collected(tmp_path, "throughput_roce")
    assert "| 16 GPUs | co2 | 12 | 16 |  |  | not run |  |  |  |" in other
    assert f"Not counted: {tmp_path / 'a-tcp-2'}: not over roce, by its folder's name." in other


def test_the_first_steps_do_not_count_in_the_throughput(tmp_path: Path):
    resnet50(tmp_path / "a", 0.75)
    lines = [{"step": 1, "seconds": 100.0}, {"step": 10, "seconds": 109.0}, {"step": 100, "seconds": 121.5}]
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 1'
    (tmp_path / "a" / "metrics.jsonl").write_text(text)  # 90 steps in 12.5 s, of 8192 samples
    run = read_run(tmp_path / "a")
    assert not isinstance(run, str) and run.results["samples_per_second"] == 90 / 12.5 * 8192
    (tmp_path / "a" / "metrics.jsonl").write_text(json.dumps(lines[0]))
    run = read_run(tmp_path / "a")
    assert not isinstance(run, str) and run.results["samples_per_second"] == 2 * 8192
