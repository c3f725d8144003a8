"""The report writer of all measurements, and the checks of their options."""

import json
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import loss_table, plots, report, slow_links, utilisation
from bench.loss.runs import Rows, markdown
from bench.peers import table
from bench.report import Spread, mean_sd, require
from bench.simulator import against
from core.errors import UserError
from results import paper

RESULTS = Path(__file__).parents[2] / "results"


@dataclass
class Options:
    rates: tuple[float, ...] = (1.0, 2.0)
    workers: int = 4
    out: Path | None = Path("folder")


def test_a_table_fills_rows_that_end_early():
    text = report.table(["a", "b", "c"], [(1, 2, 3), ("x", "not run")])
    assert text.splitlines() == ["| a | b | c |", "|---|---|---|", "| 1 | 2 | 3 |", "| x | not run |  |"]


def test_repeats_in_words():
    assert Spread.of([4.0, 1.0, 2.0]) == Spread(2.0, 1.0, 4.0)
    assert Spread.of([4.0, 1.0, 2.0]).show(".1f") == "2.0 (1.0 to 4.0)"
    assert Spread.of([0.701, 0.702]).show(".0%") == "70%", "all look alike"
    assert mean_sd([1.0, 2.0, 3.0], ".2f") == "2.00 ± 1.00" and mean_sd([0.5], ".0%") == "50%"


def test_a_result_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["x", "--out", "a folder"])
    result = report.header("bench.x", Options(), packages=("torch", "co2-no-such-package"))
    assert result["options"] == {"rates": [1.0, 2.0], "workers": 4, "out": "folder"} and result["format"] == 1
    assert result["command"] == "python -m bench.x --out 'a folder'" and result["cpu_count"] >= 1
    assert result["versions"].keys() == {"python", "torch", "co2-no-such-package"}
    assert result["versions"]["co2-no-such-package"] == "absent" and result["versions"]["torch"][0].isdigit()
    assert re.fullmatch(
        r"`python -m bench.x --out 'a folder'`, commit \S+( \(-dirty: .*\))?, 2\d{3}-\d\d-\d\d \S+",
        report.source(result),
    )
    assert report.source({"commit": "", "date": "today"}) == "commit unknown, today"
    changed = "commit abc-dirty (-dirty: the working tree had changes that were not recorded), today"
    assert report.source({"commit": "abc-dirty", "date": "today"}) == changed


def test_what_is_saved_can_be_loaded_and_is_not_overwritten(tmp_path: Path):
    folder = report.new_folder("speed", tmp_path / "new")
    result = {"format": 1, "rows": [{"folder": folder}]}
    report.save(folder, "speed", result, "| a |\n")
    assert report.load(folder / "speed.json", "bench.x") == {"format": 1, "rows": [{"folder": str(folder)}]}
    assert {path.name for path in folder.iterdir()} == {"speed.json", "speed.md"}
    with pytest.raises(UserError, match="holds a measurement: choose another --out"):
        report.new_folder("speed", folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "holds no scaling.json: measure with python -m bench.scaling --out "),
        ("{", "not JSON"),
        ("[]", "not of format 1"),
        ('{"format": 1}', "has no rows"),
    ],
)
def test_a_folder_without_measurements_is_refused(text: str | None, said: str, tmp_path: Path):
    if text is not None:
        (tmp_path / "scaling.json").write_text(text)
    with pytest.raises(UserError, match=said):
        plots.page(tmp_path)


def test_the_published_tables_are_those_of_the_published_figures():
    written = {
        "scaling": plots.markdown,
        "utilisation/scaling": utilisation.markdown,
        "utilisation/settled/scaling": utilisation.markdown,
        **dict.fromkeys(
            (
                "time_to_loss",
                "int4/time_to_loss",
                "int4_cifar10/time_to_loss",
                "int8/time_to_loss",
                "int8_cifar10/time_to_loss",
                "float_cifar10/time_to_loss",
            ),
            loss_table.markdown,
        ),
        **dict.fromkeys(("slow_links", "slow_links_10", "slow_links_bytes"), slow_links.text),
        **dict.fromkeys(("peers", *(f"peers_{rate}" for rate in (10, 20, 40, 200, 1000))), table.markdown),
    }
    for name, made in written.items():
        table_of = RESULTS / f"{name.replace('scaling', 'utilisation') if made is utilisation.markdown else name}.md"
        text = made(json.loads((RESULTS / f"{name}.json").read_text()))
        assert table_of.read_text() == report.linked(text, table_of), name


def test_every_page_of_results_leads_back_to_the_list_of_all():
    for page in RESULTS.rglob("*.md"):
        if page.parent.name != "tables" and page != RESULTS / "index.md":
            link = re.search(r"\[All results\]\(([^)]*)\)", page.read_text())
            assert link is not None and (page.parent / link[1]).resolve() == RESULTS / "index.md", page
    assert report.linked("# A page\n\nText.\n", RESULTS / "a" / "page.md") == (
        "# A page\n\n[All results](../index.md).\n\nText.\n"
    )
    assert report.linked("Text.\n", RESULTS / "page.md") == "[All results](index.md).\n\nText.\n"


def test_a_page_elsewhere_has_no_link_to_a_list_that_is_not_there(tmp_path: Path):
    report.save(tmp_path, "page", {}, "# A page\n\nText.\n")
    assert (tmp_path / "page.md").read_text() == "# A page\n\nText.\n"


def test_the_simulator_is_within_its_bounds_where_the_link_decides_and_the_page_says_so():
    rows = [row for row in against.compare(RESULTS).rows if row.link_decides and "fitted" not in row.part]
    errors = [abs(row.error) for row in rows]
    assert len(rows) >= 60 and statistics.median(errors) < 0.03 and max(errors) < 0.15
    assert (RESULTS / "simulator.md").read_text() == against.markdown(RESULTS)


def test_the_published_search_is_read_and_its_losses_stand_in_its_tables():
    """Rows of removed tasks, methods and options are read; the page has columns that its command no longer makes."""
    rows = Rows(RESULTS / "search.jsonl")
    assert (len(rows.runs), len(rows.choices)) == (603, 175)
    cells = [line.split(" | ") for line in (RESULTS / "search.md").read_text().splitlines() if line.startswith("| `")]
    page = [(asked, lr, tried, loss.strip("*")) for asked, _, lr, tried, _, _, loss, *_ in cells]
    made = [line.split(" | ") for line in markdown(rows).splitlines() if line.startswith("| `")]
    assert page == [(asked, lr, tried, loss) for asked, _, lr, tried, loss, *_ in made]


PAGES = re.findall(r"\]\((\w+\.md)\)", (RESULTS / "index.md").read_text())


def test_the_papers_numbers_stand_on_one_page_of_the_results():
    papers = (RESULTS / "paper.md").read_text()
    ours = "".join((RESULTS / page).read_text() for page in {"index.md", *PAGES} - {"paper.md", "chaos.md", "gpu.md"})
    assert "Reported by the paper (not by us)" in papers and "not run" in papers
    reported = [f"{mean:.2f}" + (f" ± {sd:.2f}" if sd else "") for mean, sd in paper.REPORTED.values()]
    reported += [f"{words:,}" for words in paper.WORDS_PER_SECOND.values()]
    for number in reported:
        assert number in papers and number not in ours
    assert all(f"{number:.2f}" in papers for number in (*paper.GAP_PERPLEXITY.values(), *paper.SCALING_RATIO.values()))


def test_every_link_of_the_results_leads_somewhere_and_no_sentence_is_a_heap_of_figures():
    """At most two figures a sentence in prose; captions (lists) and tables hold the others."""
    for page in {"index.md", *PAGES} - {"chaos.md", "gpu.md"}:
        text = (RESULTS / page).read_text()
        assert all((RESULTS / link).exists() for link in re.findall(r"\]\(([^)#:]+)\)", text)), page
        prose = re.sub(r"`[^`]*`|\([^()]*\)|\[[^]]*\]", "", re.sub(r"(?m)^(\||- |  |#|!).*$", "", text))
        for sentence in re.split(r"(?<=[.:;])\s+(?=[A-Z`*])", prose):
            figures = re.findall(r"(?<![\w.-])\d[\d.,]*(?: to \d[\d.]*)?(?: ± [\d.]+)?", sentence)
            assert len(figures) <= 2, (page, sentence)


@pytest.mark.parametrize(
    ("what", "values", "said"),
    [
        ({"once": "rates"}, (1.0, 1.0), "rates=1.0 1.0: give one or more, each once"),
        ({"once": "workers rates"}, (), "rates=: give one or more, each once"),
        ({"positive": "rates"}, (1.0, 0.0), "rates=0.0: give a number above 0"),
        ({"positive": "rates"}, float("nan"), "rates=nan: give a number above 0"),
        ({"rates": ("a", "b")}, ("x", 2), "rates: 'x' does not exist; choose among a, b"),
        ({"ones": "rates"}, 0, "rates=0: give 1 or more"),
    ],
)
def test_an_option_that_cannot_be_is_named(what: dict[str, Any], values: Any, said: str):
    good = 1 if "ones" in what else ("a",) if "rates" in what else (2.0,)
    require(SimpleNamespace(rates=good, workers=(1,)), **what)
    with pytest.raises(UserError) as error:
        require(SimpleNamespace(rates=values, workers=(1,)), **what)
    assert str(error.value) == said
