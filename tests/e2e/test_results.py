"""The pages of results/: short, linked, and every table made of its rows."""

import re
from pathlib import Path

import pytest

from results import pages, paper

RESULTS = pages.RESULTS
PAGES = sorted(RESULTS.rglob("*.md"))
REPORTED = "## Reported by the paper (not by us)"


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_a_page_s_tables_are_what_its_rows_give(page: Path):
    assert page.read_text() == pages.filled(page.read_text()), "make them again: python -m results.pages"


def test_every_table_stands_on_a_page_and_a_changed_cell_is_seen():
    text = "".join(page.read_text() for page in pages.PAGES)
    assert set(pages.MARK.findall(text)) == pages.TABLES.keys()
    for found in pages.MARK.finditer(text):
        assert len(found[0].splitlines()) > 4, found[1]
        cell = re.search(r"\d", found[0].partition("---|\n")[2])
        assert cell is not None
        place = found[0].index("---|\n") + 5 + cell.start()
        changed = found[0][:place] + str((int(cell[0]) + 1) % 10) + found[0][place + 1 :]
        assert changed != found[0] == pages.filled(changed), found[1]


def test_there_are_at_most_12_pages_of_at_most_1000_words():
    assert len(PAGES) <= 12 and all(page.parent == RESULTS for page in PAGES)
    for page in PAGES:
        words = [word for word in page.read_text().split() if re.search("[A-Za-z0-9]", word)]
        assert len(words) <= 1000, (page.name, len(words))


def prose(text: str) -> str:
    """Without tables, lists, code and headings."""
    return re.sub(r"(?m)^(\||- |  |#|!|<!).*$|`[^`]*`", "", text)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "index.md"], ids=lambda page: page.name)
def test_a_decimal_of_the_prose_stands_in_a_table_of_its_page(page: Path):
    text = page.read_text()
    tables = "".join(re.findall(r"(?m)^(?:\||- |  ).*$", text))
    for number in re.findall(r"(?<![\w.])\d+\.\d+", re.sub(r"\[[^]]*\]\([^)]*\)", "", prose(text))):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", tables), number


def test_every_link_leads_somewhere_and_the_index_names_every_page():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)
    named = set(re.findall(r"\]\((\w+\.md)\)", (RESULTS / "index.md").read_text()))
    assert named == {page.name for page in PAGES} - {"index.md"}


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
