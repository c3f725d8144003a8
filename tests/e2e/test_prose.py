"""Plain English in the documentation and the docstrings: refuses the habits that a pattern can find.

`python tests/e2e/test_prose.py FILE...` prints the violations in these Markdown and Python files, one a line. Without
files it checks the whole project, as the tests do. Code blocks, tables, links' targets and the content of inline code
do not count; an inline code is one word. In Python files only docstrings are read.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "training", "vision", "segmentation", "pointcloud", "language", "bench", "results")
LONGEST, MEAN = 40, 20  # words a sentence
ENOUGH = 5  # sentences in a file before their mean length says something
FRAGMENT = 3  # a label of so many words or fewer is no sentence in the mean

# Sentences that a rule would refuse although they are plain English, each with the reason.
ALLOWED = (
    (r"^By (default|hand)\b", "adverbs that PyTorch's documentation begins sentences with as well"),
    (r"\bunless .* otherwise\b", "'unless you say otherwise' is the common idiom"),
)

SUBJECT = "no 'What X does' as subject"
BEGIN = r"^[\"'(]?(?i:{})\b"
PREPOSITIONS = (
    "of|with|in|at|on|from|for|by|to|above|below|before|after|without|under|over|between|near|inside"
    "|that|which|who|whose|where"
)
# What may follow a noun, so that "the mean" and "the one" are nouns there.
VERBS = "is|are|was|were|has|had|can|may|will|must|does|arrives|takes|comes"
AFTER_NOUN = rf"(?= (?:{PREPOSITIONS}|{VERBS}|and|or|but|as|than|instead|while|when)\b|'s\b|[.,;:)]|$)"
DETERMINER = "a|an|the|each|every|its|this|that|no|last|next|late|least|lowest|smallest|highest|new|old|whole|outer"
STATISTICS = r"(?!.*(?:±|deviation|seeds?\b|interval|median|variance))(?<!.)"  # at the sentence's begin: no statistics
ALONE = (
    "train|trains|trained|training|run|runs|running|ran|work|works|leave|leaves|left|let|stand|stands|is|are|was|not"
)

# Rule: what it says to the writer, and its pattern, searched in a sentence on one line.
RULES: list[tuple[str, re.Pattern[str]]] = [
    (name, re.compile(pattern))
    for name, pattern in (
        ("repeat the noun", r"\b(?:[Tt]hose|(?<!so )[Tt]hat) of\b"),
        ("repeat the noun", r"\b[Tt]hose (?:that|which|who|whose|with|without|in|at|from)\b"),
        ("repeat the noun", rf"\b[Tt]he ones\b|\b[Tt]he one(?: (?:{PREPOSITIONS})\b|[.,;:)]|$)"),
        ("repeat the noun", r"\b[Tt]he others\b"),
        ("repeat the noun", r"\b(?:than|from|with|by|like) what\b|\bwhat of\b"),
        (SUBJECT, r"^[\"'(]?(?:What|Which)(?! (?:to|is|are|was|does|do)\b)\b(?!:).*(?<!\?)$"),
        ("begins with Of, By, ...", BEGIN.format("of|by|beside|beneath|in it|in them")),
        ("begins with So it is", BEGIN.format("so (?:it )?(?:is|are|was|does|do|has|have|it)")),
        ("say 'if you ...'", BEGIN.format("(?:and |but )?who(?:ever|se|m)?") + r".*(?<!\?)$"),
        ("say 'if you ...'", r"[;:,] who (?:wants|knows|needs|takes|gives|uses|has)\b"),
        ("say because", r"[,;] for (?:it|they|we|there|he)\b(?= \w)"),
        ("beside: next to, in addition to", r"\b[Bb]eside\b"),
        ("beneath, underneath: during, below", r"\b(?:[Bb]eneath|[Uu]nderneath)\b"),
        (
            "stand: appear",
            r"\b(?:stands?|stood) (?:in|at|on|under|by|there|here|above|below|next|before|after|between|near|where)\b",
        ),
        ("know: support", r"\bknows\b"),
        (
            "want: need",
            r"\bwants\b|\b(?:[Tt]hey|it|which|that|[Tt]hese|[Tt]hose|\w+s) want\b(?<!users want)(?<!readers want)",
        ),
        (
            "take: use",
            r"\b(?:takes?|took|taken) (?:tau(?! (?:local )?steps)|int\d|float\d+|bfloat16|settings|the settings)\b",
        ),
        (
            "otherwise: differently",
            r"\botherwise than\b"
            r"|^(?!.*\b(?:[Ii]f|[Ww]hen|[Uu]nless)\b).*[a-z0-9] (?<!or )otherwise(?=[.,;:)]|$| (?:in|on|with|at)\b)",
        ),
        (
            "unlike: different",
            rf"\b(?:{PREPOSITIONS}|is|are|be|have|has|two|these|more|so|as|most|and|or|very) unlike\b",
        ),
        ("alone: only", rf"(?<!-)\b(?!(?:{ALONE})\b)[\w)]+ alone\b"),
        (
            "mean: average, averaged update",
            STATISTICS + rf".*?\b(?:(?i:{DETERMINER})) means?(?<!no means)(?<!this means)(?<!that means){AFTER_NOUN}",
        ),
        ("wire: compression", r"\b[Ww]ir(?:e|es|ed|ing)\b"),
        ("told: reported", r"\b[Tt]old\b"),
        ("heard: received", r"\b[Hh]ear(?:d|s|ing)?\b"),
        (
            "American spelling",
            r"(?i)\b\w*(?:optimis|initialis|normalis|quantis|synchronis|serialis|parallelis|generalis|minimis|maximis|summaris"
            r"|recognis|utilis|regularis|vectoris|tokenis)(?:e|es|ed|er|ers|ing|ation|ations)\b"
            r"|\b(?:behaviour|colour|neighbour|favour|honour)\w*|\b(?:centre|grey|whilst|learnt|licence|artefact|labelled|modelled)s?\b",
        ),
    )
]

ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|approx|resp|Fig|Figs|Eq|Sec|Dr|incl))\.$")
ABBREVIATION_BEFORE_NUMBER = re.compile(r"\b(?:al|[Nn]o|[Nn]os|p|pp|[Ss]ect|[Cc]h|[Vv]ol|etc)\.$")
END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
CODE = re.compile("\ue000(\\d+)\ue001")  # stands for an inline code in the text of a block
MARKER = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
SECTION = re.compile(
    r"\s*(Args|Arguments|Attributes|Raises|Returns|Yields|Notes?|Examples?|Warnings?|Shapes?|References|See Also):$"
)
NAMED = ("Args", "Arguments", "Attributes", "Raises")  # sections of entries `name (type): description`
ENTRY = re.compile(r"\s*\*{0,2}[\w.\ue000\ue001]+(?:(?:,| and| or) \*{0,2}[\w.\ue000\ue001]+)*(?: \([^)]*\))?:(?=\s|$)")
LABEL = re.compile(
    r"(?:\*\*[^*]+\*\*(?:, \*\*[^*]+\*\*)*|\ue000\d+\ue001(?:(?:,| and| or) \ue000\d+\ue001)*)(?: \([^)]*\))?:(?=\s|$)"
)


@dataclass
class Block:
    """A paragraph, a heading, an item of a list or an entry of a docstring's section. line: of its start, from 1."""

    line: int
    text: str
    heading: bool = False


@dataclass
class Sentence:
    """text: on one line, with tokens for inline code. shown: with the code."""

    line: int
    text: str
    shown: str
    heading: bool

    @property
    def words(self) -> int:
        return sum(any(c.isalnum() for c in word) for word in self.text.split())


def sentences(block: Block, codes: list[str]) -> Iterator[Sentence]:
    """Splits a block into its sentences."""
    start = 0
    for end in [*END.finditer(block.text), None]:
        stop = end.end() if end else len(block.text)
        if end and stop < len(block.text):
            before, after = block.text[start : end.start() + 1], block.text[stop:].lstrip()
            if ABBREVIATION.search(before) or (end[0].startswith("..") and not after[:1].isupper()):
                continue
            if ABBREVIATION_BEFORE_NUMBER.search(before) and not after[:1].isupper():
                continue
        part = block.text[start:stop]
        line = block.line + block.text.count("\n", 0, start + len(part) - len(part.lstrip()))
        if text := " ".join(part.split()):
            yield Sentence(line, text, CODE.sub(lambda m: codes[int(m[1])], text), block.heading)
        start = stop


def hide_code(text: str, codes: list[str]) -> str:
    """The text with a token in the place of each inline code, link's target, formula and tag; as many lines."""

    def token(match: re.Match[str]) -> str:
        codes.append(" ".join(match[0].split()))
        return f"\ue000{len(codes) - 1}\ue001" + "\n" * match[0].count("\n")

    def lines(match: re.Match[str], text: str = "") -> str:
        return text + "\n" * match[0].count("\n")

    text = re.sub(r"<!--.*?-->", lines, text, flags=re.DOTALL)
    text = re.sub(r"(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\1(?!`)", token, text, flags=re.DOTALL)
    text = re.sub(r"\$[^$\s](?:[^$\n]*[^$\s])?\$", token, text)
    text = re.sub(r"\]\([^()\s]*(?:\([^()\s]*\)[^()\s]*)*(?:\s+\"[^\"]*\")?\)", lambda m: lines(m, "]"), text)
    text = re.sub(r"\]\[[^\]\n]*\]", "]", text)
    text = re.sub(r"<?https?://[^\s>)]*[^\s>).,;:]>?", token, text)
    return re.sub(r"</?[a-zA-Z][^<>\n]*>", "", text)


def plain(text: str) -> str:
    """Without the marks of emphasis, links and pictures."""
    text = re.sub(r"(?<!\w)_(\w[^_\n]*)_(?!\w)", r"\1", text)
    text = re.sub(r"\*+(?=\S)|(?<=\S)\*+", "", text)
    return re.sub(r"\\(?=\W)", "", re.sub(r"!?\[|\]", "", text))


def paragraphs(text: str, first: int, codes: list[str], indented: int | None = None) -> list[Block]:
    """Returns the blocks of prose of a Markdown page or a docstring.

    Args:
        text: The page or the docstring.
        first: Number of its first line.
        codes: Gets the inline code that tokens stand for.
        indented: Columns by which a docstring is indented, None for a page.
    """
    text = re.sub(r"(?m)^( *)(```+|~~~+).*?\n(?:.*\n)*?\1\2 *$", lambda m: "\n" * m[0].count("\n"), text)
    lines = hide_code(text, codes).split("\n")
    docstring, base = indented is not None, indented or 0
    found: list[Block] = []
    section, entry, in_list, blank, skip = "", 0, False, True, False

    def add(line: int, text: str, *, heading: bool = False) -> None:
        found.append(Block(line, text, heading))

    for number, raw in enumerate(lines, first):
        indent = len(raw) - len(raw.lstrip())
        stripped = raw.strip()
        if not stripped:
            blank, skip = True, False
            continue
        heading, marker = re.match(r"\s*#{1,6}\s+", raw), MARKER.match(raw)
        named = docstring and number != first and SECTION.match(raw)
        if named:
            section, entry, blank = named[1], indent + 4, True
            continue
        if section and indent < entry and blank:
            section = ""
        if skip or stripped.startswith((">>>", ":::", "|")):
            skip, blank = skip or not stripped.startswith("|"), True
        elif heading and not docstring:
            add(number, stripped.lstrip("# "), heading=True)
            blank, in_list = True, False
        elif re.match(r"(!!!|\?\?\?\+?|===) ", stripped):  # an admonition: its content is indented
            in_list, blank = True, True
        elif re.fullmatch(r"[-=*_\s]{3,}", stripped) or re.match(r"\[\^?[\w-]+\]: ", stripped):
            blank = True
        elif section in NAMED and indent == entry and (name := ENTRY.match(raw)):
            blank = not raw[name.end() :].strip()
            if not blank:
                add(number, raw[name.end() :].strip())
        elif marker and (blank or in_list or raw.lstrip()[:1] in "-*+" or stripped.startswith("1")):
            body = raw[marker.end() :]
            label = LABEL.match(body)
            add(number, body[label.end() :].lstrip() if label else body)
            in_list, blank = True, False
        elif blank and not section and indent - base >= 4 and not in_list and number != first:
            skip = True  # code that is indented
        elif blank or not found:
            label = LABEL.match(stripped)
            add(number, stripped[label.end() :].lstrip() if label else stripped)
            in_list, blank = in_list and indent > base, False
        else:
            found[-1].text += "\n" * (number - found[-1].line - found[-1].text.count("\n")) + stripped
    return [Block(b.line, plain(b.text), b.heading) for b in found]


def docstrings(source: str) -> Iterator[tuple[int, int, str]]:
    """Yields the line, the indentation and the text of each docstring, also below attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for i, child in enumerate(body):
                first = i == 0 and isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                below = i > 0 and isinstance(body[i - 1], (ast.Assign, ast.AnnAssign))
                value = child.value if isinstance(child, ast.Expr) else None
                if (first or below) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.lineno, value.col_offset, value.value


def prose(text: str, *, python: bool) -> list[Sentence]:
    """The sentences of a page, or of a module's docstrings, in the order of their lines."""
    codes: list[str] = []
    if python:
        blocks = [b for line, indented, doc in docstrings(text) for b in paragraphs(doc, line, codes, indented)]
    else:
        blocks = paragraphs(text, 1, codes)
    return sorted((s for b in blocks for s in sentences(b, codes)), key=lambda s: s.line)


def broken_rules(sentence: Sentence) -> list[str]:
    """The names of the rules that a sentence breaks, each once."""
    if any(re.search(pattern, sentence.text) for pattern, _ in ALLOWED):
        return []
    broken = dict.fromkeys(rule for rule, pattern in RULES if pattern.search(sentence.text))
    if sentence.heading:  # "What a run costs" is a usual heading
        broken.pop(SUBJECT, None)
    return list(broken)


def check(text: str, name: str, *, python: bool) -> list[str]:
    """One line for each violation, such as `file:line: rule: the sentence`."""
    found, lengths = [], []
    for s in prose(text, python=python):
        broken = broken_rules(s)
        marks = len(re.findall(r"[:;](?=[\s\"')]|$)", s.text))
        if marks > 1 and not s.heading:
            broken.append(f"{marks} colons and semicolons")
        if s.words > LONGEST:
            broken.append(f"{s.words} words")
        if s.words > FRAGMENT and not s.heading:
            lengths.append(s.words)
        found += [f"{name}:{s.line}: {rule}: {s.shown}" for rule in broken]
    if len(lengths) >= ENOUGH and sum(lengths) > MEAN * len(lengths):
        found.append(f"{name}:1: mean sentence length: {sum(lengths) / len(lengths):.1f} words, at most {MEAN}")
    return found


def check_file(path: Path) -> list[str]:
    name = path.resolve().relative_to(ROOT).as_posix() if path.resolve().is_relative_to(ROOT) else str(path)
    return check(path.read_text(), name, python=path.suffix == ".py")


def all_files() -> list[Path]:
    pages = [*(ROOT / n for n in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "slurm/README.md"))]
    pages += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "results").glob("*.md"))
    return pages + [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", [path.relative_to(ROOT).as_posix() for path in all_files()])
def test_reads_as_plain_english(path):
    found = check_file(ROOT / path)
    assert not found, "\n" + "\n".join(found)


def split(text: str, *, python: bool = False) -> list[tuple[int, str]]:
    return [(s.line, s.shown) for s in prose(text, python=python)]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Some codes, e.g. int4, i.e. 4 bits vs. 32. Next.", ["Some codes, e.g. int4, i.e. 4 bits vs. 32.", "Next."]),
        ("A loss of 0.25 at 1.5 s. tau follows.", ["A loss of 0.25 at 1.5 s.", "tau follows."]),
        ("Needs Python 3.11. `tau` is 5.", ["Needs Python 3.11.", "`tau` is 5."]),
        ("After Sun et al. (2024), no. 3, see Fig. 2. Then", ["After Sun et al. (2024), no. 3, see Fig. 2.", "Then"]),
        ("Lists, tuples etc. are read. So are dicts.", ["Lists, tuples etc. are read.", "So are dicts."]),
        ("It waits ... and goes on. It ends ...", ["It waits ... and goes on.", "It ends ..."]),
        ('(It waits.) It says "stop." It stops.', ["(It waits.)", 'It says "stop."', "It stops."]),
        ('Read [the page](a.md#b_(c) "x. y"). Run **all**.', ["Read the page.", "Run all."]),
        ("See https://a.b/c.d?e=f. Then `a. B; c: d` ends.", ["See https://a.b/c.d?e=f.", "Then `a. B; c: d` ends."]),
    ],
)
def test_splits_sentences(text, expected):
    assert [shown for _, shown in split(text)] == expected


def test_reads_only_prose_of_a_page():
    page = """# A title

<!-- table: a; b: c; wire -->

First sentence
goes on. Second one:

- **label**: an item. Its
  second sentence
- `a`, `b`: another item
1. A step

| a table | wire |
|---|---|

```console
$ wire; wire: wire
```

![A picture](wire.svg) is `wire
wire` here. Last.

    $ an indented block; wire:
"""
    assert split(page) == [
        (1, "A title"),
        (5, "First sentence goes on."),
        (6, "Second one:"),
        (8, "an item."),
        (8, "Its second sentence"),
        (10, "another item"),
        (11, "A step"),
        (20, "A picture is `wire wire` here."),
        (21, "Last."),
    ]


def test_reads_docstrings():
    source = '''"""The module's.

    code; with: x

Goes on. And on.
"""
tau = 5
"""Steps a round."""
text = "wire; wire: wire."


def f(x, *args):
    """Returns what it gets; nothing: more.

    >>> f(wire)
    wire

    Args:
        x: the first; float32, shape (n,).
            It goes on.
        *args (int): ignored.

    Returns:
        The first.

    Raises:
        ValueError: if it is 0. Or less.
    """
    "wire"
'''
    assert split(source, python=True) == [
        (1, "The module's."),
        (5, "Goes on."),
        (5, "And on."),
        (8, "Steps a round."),
        (13, "Returns what it gets; nothing: more."),
        (19, "the first; float32, shape (n,)."),
        (20, "It goes on."),
        (21, "ignored."),
        (24, "The first."),
        (27, "if it is 0."),
        (27, "Or less."),
    ]
    assert check(source, "f.py", python=True) == [
        "f.py:13: 2 colons and semicolons: Returns what it gets; nothing: more."
    ]


@pytest.mark.parametrize(
    "text, rule",
    [
        ("`CO2Config(tau=48)` has those of the authors' example.", "repeat the noun"),
        ("The time is that of DDP.", "repeat the noun"),
        ("CO2 uses tau 12, the others use 6.", "repeat the noun"),
        ("The penalty is the one in the paper.", "repeat the noun"),
        ("What the all-reduce holds is dropped.", SUBJECT),
        ("Of all packages one was tried.", "begins with Of, By, ..."),
        ("So it is with every method.", "begins with So it is"),
        ("Who knows a better tau gives it.", "say 'if you ...'"),
        ("The top-1 accuracy is 96.7 % beside 98.6 %.", "beside"),
        ("The all-reduce runs underneath the next steps.", "beneath"),
        ("The numbers stand in a table.", "stand"),
        ("Shared outer state knows one merge.", "know"),
        ("They want a run of many rounds.", "want"),
        ("CO2 takes tau auto.", "take"),
        ("Another CPU rounds otherwise.", "otherwise"),
        ("The documents have unlike lengths.", "unlike"),
        ("This costs memory alone.", "alone"),
        ("A mean is merged when it lands.", "mean"),
        ("CO2 has the least mean on digits.", "mean"),
        ("A narrow wire saves bytes.", "wire"),
        ("It cannot be told from Local-SGD.", "told"),
        ("Rank 0 has heard from all.", "heard"),
        ("It normalises the neighbours' colours.", "American spelling"),
        ("It merges: the average; then it waits; then it ends.", "3 colons and semicolons"),
        ("word " * 41, "41 words"),
        ("One two three four five six seven. " * 4 + "word " * 38 + "word " * 40, "78 words"),
        (("word " * 20 + "end. ") * 5, "mean sentence length"),
    ],
)
def test_refuses(text, rule):
    assert any(line.startswith("p.md:1: " + rule) for line in check(text, "p.md", python=False))


@pytest.mark.parametrize(
    "text",
    [
        "By default, the run that Rank 0 started is so fast that of three runs one ends.",
        "If you know a better tau, set it; otherwise the run measures it.",
        "It would otherwise wait, unless you say otherwise.",
        "It is bfloat16 if the hardware has it, and float32 otherwise.",
        "Unlike DDP, CO2 hides the all-reduce, and likely all of it.",
        "Workers train alone for tau local steps, which means that nobody waits.",
        "Each worker takes tau steps, and users want no more.",
        "The mean of three seeds is 3.5 ± 0.2, and the mean loss falls.",
        "It does so by means of the other group, and the one GPU stands for two.",
        "What is hidden? Who needs this? Which settings are right?",
        "At 10:30 the ratio 4:1 of host:29500 counted: `a: b; c: d`.",
        "An example of standard hearings, wireless foreknowledge, and besides a standalone understanding.",
    ],
)
def test_accepts(text):
    assert check(text, "p.md", python=False) == []


if __name__ == "__main__":
    lines = [line for path in (map(Path, sys.argv[1:]) if sys.argv[1:] else all_files()) for line in check_file(path)]
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(bool(lines))
