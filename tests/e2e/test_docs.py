"""README, the documentation and results/: short, current, linked, and true."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

import core
from core.testing import run_distributed
from results import pages, paper
from tests import documented
from tests.imports import ROOT, files

# {.python} shows a file of examples/: ruff formats what stands in plain python blocks
LANGUAGES = ("python", "{.python}", "console", "text", "diff", "yaml", "bash", "bibtex")
README = (ROOT / "README.md").read_text()
RESULTS = pages.RESULTS
PAGES = sorted(RESULTS.rglob("*.md"))


def paragraphs(text: str) -> list[str]:
    """Without code blocks, tables and headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [part for part in re.split(r"\n\s*\n", text) if part.strip() and part.strip()[0] not in "|#"]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 110 and len(README.split()) <= 900
    for part in paragraphs(README):
        assert len(part.splitlines()) <= 5, part


# -- code blocks -------------------------------------------------------------------------------------------------


def test_every_code_block_is_run_or_marked_as_what_it_is():
    for block in documented.blocks():
        assert block.language in LANGUAGES, block.where
        if block.language == "yaml":
            assert yaml.safe_load(block.code), block.where
        if block.language == "bash":
            subprocess.run(["bash", "-n"], input=block.code, text=True, check=True, timeout=60)
    titles = [block.title for block in documented.blocks() if block.language == "python" and block.title]
    assert titles == ["elastic.py", "train.py"], "a whole script needs a test of its own"
    for path in documented.PAGES:
        assert path.read_text().count("```") == 2 * sum(b.page.endswith(path.name) for b in documented.blocks()), path


def shown() -> list[documented.Block]:
    return [block for block in documented.blocks() if block.language == "{.python}"]


def test_a_page_shows_files_that_a_test_runs():
    tested = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_docs.py")
    files = [block.code.removeprefix('--8<-- "').removesuffix('"\n') for block in shown()]
    assert len(files) == 3
    for file in files:
        assert (ROOT / file).is_file() and Path(file).stem in tested, file


def test_the_pieces_run_on_two_workers(tmp_path: Path):
    run_distributed(documented.run_pieces, 2, str(tmp_path), timeout=120)


def test_the_readme_s_loop_trains_one_model():
    first, second = run_distributed(documented.run_diff, 2)
    assert torch.equal(first, second)


@pytest.mark.parametrize("which", ["script", "loop"])
def test_a_loop_with_dropout_that_is_stopped_within_an_epoch_resumes_bit_for_bit(which: str, tmp_path: Path):
    for ends in run_distributed(documented.run_resumed, 2, str(tmp_path), which, timeout=120):
        (calm, undisturbed), (_, stopped), (began, resumed) = ends
        assert calm == 0 and began == 80 and torch.equal(undisturbed, resumed) and not torch.equal(stopped, resumed)


def test_the_elastic_example_survives_a_death(tmp_path: Path):
    """Worker 1 is killed once, and a new one joins. Both end with the same model."""
    waits = "time.sleep(0.01 + 0.2 * (loop.members.size < 2))"
    dies = "(loop.members.name, step) == ('1.0', 52) and os.kill(os.getpid(), 9)"
    code = "import os, time\n" + documented.script("elastic.py").code.replace("co2_training", "core")
    code = code.replace("    optimizer.step()", f"    {waits}; {dies}\n    optimizer.step()")
    (tmp_path / "elastic.py").write_text(f"{code}torch.save(model.state_dict(), loop.members.name)\n")
    command = [sys.executable, "-m", "core.elastic.launch", "--nproc-per-node=2", "--max-restarts=1", "elastic.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "worker 1.0 died (status -9): restarting it\n", done.stderr
    ended = re.findall(r"worker (\S+) ended at step 200 among 2", done.stdout)  # both may write before a line's end
    assert sorted(ended) == ["0.0", "1.1"], done.stdout
    first, second = (torch.load(tmp_path / name) for name in ("0.0", "1.1"))
    assert all(torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True))


def commands() -> list[tuple[str, str]]:
    """Page and command of every line of a shell transcript."""
    of_shell = [block for block in documented.blocks() if block.language == "console"]
    lines = [(b.where, line) for b in of_shell for line in b.code.replace("\\\n", " ").splitlines()]
    assert all(line.startswith("$ ") for _, line in lines)
    return [(where, line[2:].partition("   #")[0]) for where, line in lines]


def test_commands_name_what_is_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    titles = {block.title for block in documented.blocks()}
    for where, command in commands():
        for target in re.findall(r"^make ([a-z-]+)", command):
            assert target in targets, f"{where}: {command}"
        for module in re.findall(r"-m ((?!TASK)[\w.]+)", command.replace("co2_training", "core")):
            assert importlib.util.find_spec(module), f"{where}: {command}"
        for file in re.findall(r"[\w/]+\.(?:py|sh)\b", command):
            assert file in titles or (ROOT / file).is_file(), f"{where}: {command}"


def test_each_public_name_has_an_example_that_runs():
    run = "".join(block.code for block in documented.blocks() if block.language in ("python", "diff"))
    missing = [name for name in core.__all__ if not re.search(rf"\b{name}\b", run)]
    assert len(core.__all__) <= 16 and not missing, missing


def test_tests_that_a_page_names_exist():
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {name for path in documented.PAGES for name in re.findall(r"`(test_\w+)`", path.read_text())}
    assert len(named) > 5 and all(f"def {name}(" in sources for name in named), named


def test_what_the_design_page_names_is_in_core():
    sources = "".join(path.read_text() for path in (ROOT / "core").rglob("*.py"))
    page = (ROOT / "docs/design.md").read_text().partition("## A boundary")[2].partition("## Where")[0]
    named = {name.rpartition(".")[2] for name in re.findall(r"`([A-Za-z_.]+)(?:\([^`]*\))?`", page)}
    named -= {"keep_local"}
    missing = [name for name in named if not re.search(rf"(def|class) {name}\b", sources)]
    assert len(named) > 10 and not missing, missing


# -- links and messages ------------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", [*documented.PAGES, *PAGES], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path):
    """As on a code host; the site's own check is the strict build."""
    text = documented.FENCE.sub("", path.read_text())
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^()\s]+)\)", text)):
        if ":" in target:
            continue
        file = path.parent / target if target else path
        assert file.exists(), f"{path.name}: {target}"
        if anchor:
            assert anchor in map(slug, re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)), f"{target}#{anchor}"


def test_what_the_quick_start_quotes_is_a_message():
    """Most pairs of words that follow each other are in the source; the others are where pieces of a message meet."""
    told = " ".join("".join((ROOT / file).read_text() for file in files()).split())
    quotes = re.findall(r"\*\*`(.*?)`\*\*", (ROOT / "docs/index.md").read_text())
    assert len(quotes) > 3
    for quote in quotes:
        parts = [part.split() for part in quote.split("...")]
        pairs = [f"{a} {b}" for words in parts for a, b in zip(words, words[1:], strict=False)]
        assert sum(pair in told for pair in pairs) >= 0.75 * len(pairs), quote


# -- results/: every table is made of its rows ------------------------------------------------------------------------


REPORTED = "## Reported by the paper (not by us)"


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_a_page_s_tables_are_what_its_rows_give(page: Path):
    assert page.read_text() == pages.filled(page.read_text()), "make them again: python -m results.pages"


def test_every_table_stands_on_a_page_and_a_changed_cell_is_seen():
    text = "".join(page.read_text() for page in pages.PAGES)
    assert set(pages.MARK.findall(text)) == pages.TABLES.keys()
    found = {mark[1]: mark[0] for mark in pages.MARK.finditer(text)}
    assert all(len(table.splitlines()) > 4 for table in found.values())
    table = found["readme_seconds"]
    cell = re.search(r"\d", table.partition("---|\n")[2])
    assert cell is not None
    place = table.index("---|\n") + 5 + cell.start()
    changed = table[:place] + str((int(cell[0]) + 1) % 10) + table[place + 1 :]
    assert changed != table == pages.filled(changed)


def test_there_are_at_most_12_pages_of_at_most_7400_words_in_all():
    """A word has a letter or a digit, so borders of tables do not count."""
    assert len(PAGES) <= 12 and all(page.parent == RESULTS for page in PAGES)
    assert sum(bool(re.search(r"\w", word)) for page in PAGES for word in page.read_text().split()) <= 7400


@pytest.mark.parametrize("page", [*documented.PAGES[1:], *PAGES], ids=lambda page: page.name)
def test_a_page_opens_with_one_sentence_and_then_a_picture_a_table_or_an_example(page: Path):
    title, finding, *rest = page.read_text().split("\n\n")
    assert title.startswith("# ") and finding[-1] in ".:" and ". " not in finding.replace("\n", " "), finding
    shown = rest[1] if rest[0].startswith("## ") else rest[0]
    assert shown.startswith(("![", "|", "<!-- table: ", "```")), shown


def test_a_page_shows_every_picture():
    for path in RESULTS.rglob("*.png"):
        assert any(f"]({path.name})" in page.read_text() for page in PAGES), f"no page shows {path.name}"


def test_the_index_names_every_page():
    named = set(re.findall(r"\]\((\w+\.md)\)", (RESULTS / "index.md").read_text()))
    assert named == {page.name for page in PAGES} - {"index.md"}


def prose(text: str) -> str:
    """Without tables, lists, code and headings."""
    return re.sub(r"(?m)^(\||- |  |#|!|<!).*$|`[^`]*`", "", text)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "index.md"], ids=lambda page: page.name)
def test_a_decimal_of_the_prose_stands_in_a_table_of_its_page(page: Path):
    text = page.read_text()
    tables = "".join(re.findall(r"(?m)^(?:\||- |  ).*$", text))
    for number in re.findall(r"(?<![\w.])\d+\.\d+", re.sub(r"\[[^]]*\]\([^)]*\)", "", prose(text))):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", tables), number


def test_the_paper_s_numbers_stand_apart_from_ours():
    page = (RESULTS / "tables.md").read_text()
    reported = page.partition(REPORTED)[2].partition("\n## ")[0]
    ours = page.replace(reported, "") + "".join(p.read_text() for p in PAGES if p.name != "tables.md")
    assert "not run" in reported
    numbers = [f"{mean:.2f}" + (f" ± {sd:.2f}" if sd else "") for mean, sd in paper.REPORTED.values()]
    numbers += [f"{words:,}" for words in paper.WORDS_PER_SECOND.values()]
    for number in numbers:
        assert number in reported and number not in ours, number
    assert all(f"{n:.2f}" in reported for n in (*paper.GAP_PERPLEXITY.values(), *paper.SCALING_RATIO.values()))


def test_every_commit_of_a_row_is_in_the_history_or_known_as_lost():
    def commits(found: object) -> Iterator[str]:
        if isinstance(found, dict):
            yield from [found["commit"]] if isinstance(found.get("commit"), str) else []
        for each in found.values() if isinstance(found, dict) else found if isinstance(found, list) else []:
            yield from commits(each)

    git = subprocess.run(["git", "rev-list", "HEAD"], cwd=RESULTS, capture_output=True, text=True)
    history = git.stdout.split()
    if len(history) < 100:
        pytest.skip("a copy without the history")
    named = {name for path in RESULTS.rglob("*.json*") for row in rows_of(path) for name in commits(row)}
    named = {re.split(r"\W", name.strip())[0] for name in named}
    gone = {name for name in named if not any(one.startswith(name) for one in history)}
    assert gone == set((RESULTS / "lost_commits").read_text().split()) and len(named) > 50


def rows_of(path: Path) -> list[object]:
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]
