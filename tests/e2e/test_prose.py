"""Plain English in the documentation and the docstrings: refuses the habits that a pattern can find.

`python tests/e2e/test_prose.py FILE...` prints the violations in these Markdown and Python files, one a line. Without
files it checks the whole project, as the tests do. Code, tables and links' targets do not count; an inline code is one
word. In Python files only docstrings are read.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "training", "vision", "segmentation", "pointcloud", "language", "bench", "results")
LONGEST, MEAN = 40, 20  # words a sentence
ENOUGH, FRAGMENT = 5, 3  # the mean is of so many sentences at least, each of more words
BEGIN = r"^[\"'(]?(?i:{})\b"
PREPOSITIONS = (
    "of|with|in|at|on|from|for|by|to|above|below|before|after|without|under|over|between|near|inside"
    "|that|which|who|whose|where"
)
VERBS = "is|are|was|were|has|had|can|may|will|must|does|arrives|takes|comes"
NOUN = rf"(?= (?:{PREPOSITIONS}|{VERBS}|and|or|but|as|than|instead|while|when)\b|'s\b|[.,;:)]|$)"
DETERMINER = "a|an|the|each|every|its|this|that|no|last|next|late|least|lowest|smallest|highest|new|old|whole|outer"
ALONE = (
    "train|trains|trained|training|run|runs|running|ran|work|works|leave|leaves|left|let|stand|stands|is|are|was|not"
)
ALLOWED = re.compile(r"^By (?:default|hand)\b|\bunless .* otherwise\b")  # plain English all the same

# What a rule says to the writer, and its pattern, searched in a sentence on one line.
RULES = [
    ("repeat the noun", r"\b(?:[Tt]hose|(?<!so )[Tt]hat) of\b|\b[Tt]he (?:ones|others)\b"),
    ("repeat the noun", r"\b[Tt]hose (?:that|which|who|whose|with|without|in|at|from)\b"),
    ("repeat the noun", rf"\b[Tt]he one(?: (?:{PREPOSITIONS})\b|[.,;:)]|$)"),
    ("repeat the noun", r"\b(?:than|from|with|by|like) what\b|\bwhat of\b"),
    ("no 'What X does' as subject", r"^[\"'(]?(?:What|Which)(?! (?:to|is|are|was|does|do)\b)\b(?!:).*(?<!\?)$"),
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
    ("want: need", r"\bwants\b|\b(?:it|which|that|\w+s|[Tt]hey|[Tt]h[eo]se) want\b(?<!users want)(?<!readers want)"),
    ("take: use", r"\b(?:takes?|took|taken) (?:tau(?! (?:local )?steps)|int\d|float\d+|bfloat16|(?:the )?settings)\b"),
    (
        "otherwise: differently",
        r"\botherwise than\b"
        r"|^(?!.*\b(?:[Ii]f|[Ww]hen|[Uu]nless)\b).*[a-z0-9] (?<!or )otherwise(?=[.,;:)]|$| (?:in|on|with|at)\b)",
    ),
    ("unlike: different", rf"\b(?:{PREPOSITIONS}|is|are|be|have|has|two|these|more|so|as|most|and|or|very) unlike\b"),
    ("alone: only", rf"(?<!-)\b(?!(?:{ALONE})\b)[\w)]+ alone\b"),
    (
        "mean: average, averaged update",
        r"(?!.*(?:±|deviation|seeds?\b|interval|median|variance))(?<!.).*?"  # unless the sentence is on statistics
        rf"\b(?:(?i:{DETERMINER})) means?(?<!no means)(?<!this means)(?<!that means){NOUN}",
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
]

GONE = r"^ *(```+|~~~+).*?\n(?:.*\n)*? *\1 *$|<!--(?s:.*?)-->|\]\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s+\"[^\"]*\")?\)"
GONE += r"|\]\[[^\]\n]*\]|^\[\^?[\w-]+\]: .*$|</?[a-zA-Z][^<>\n]*>"
CODE = r"(`+)(?!`)(?:(?!\n\s*\n)(?s:.))+?(?<!`)\1(?!`)|\$[^$\s](?:[^$\n]*[^$\s])?\$|<?https?://[^\s>)]*[^\s>).,;:]>?"
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Notes?|Examples?|Warnings?|Shapes?|References):$")
START = re.compile(r"#{1,6} |[-*+] |\d+[.)] |(?:!!!|\?\?\?\+?|===) .*$")
NAME = r"(?:\*\*[^*]+\*\*|[*\w.\ue000\ue001]+)"
LABEL = re.compile(rf"{NAME}(?:(?:,| and| or) {NAME})*(?: \([^)]*\))?:(?=\s|$)")
END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!\bcf)(?<!\bvs)(?<!\bal)(?<!\b[Nn]o)(?<!\betc)[.!?]+[\"')\]]*\s+")


def sentences(text: str, first: int = 1, base: int = 0) -> Iterator[tuple[int, str, bool]]:
    """The line, the text and whether it is a heading, of each sentence of a page or a docstring indented by base."""
    text = re.sub(GONE, lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE)
    text = re.sub(CODE, lambda m: "\ue0001\ue001" + "\n" * m[0].count("\n"), text)
    blocks: list[tuple[int, list[str], bool]] = []
    fresh, inside, skip = True, False, False  # after a blank line, in a list or a section, in indented code
    for number, line in enumerate(text.split("\n"), first):
        indent, words = len(line) - len(line.lstrip()), line.strip()
        start = START.match(words)
        if not words or words.startswith(("|", ">>>", ":::")) or SECTION.match(words):
            inside = inside or bool(SECTION.match(words))
            fresh, skip = True, words.startswith(">>>")
            continue
        inside = bool(start and words[0] != "#") or (inside and (indent > base or not fresh))
        skip = skip or (fresh and not inside and indent - base >= 4 and number != first)
        label = LABEL.match(words[start.end() :] if start else words) if inside or words[0] in "*\ue000" else None
        if skip:
            continue
        rest = words[(start.end() if start else 0) + (label.end() if label else 0) :].strip()
        if fresh or start or label:
            blocks.append((number, [rest], words[0] == "#"))
        else:
            blocks[-1][1].append(rest)
        fresh = bool(start and words[0] == "#")
    for number, lines, heading in blocks:
        plain = re.sub(r"!?\[|\]|\*+(?=\S)|(?<=\S)\*+|\b_(?=\w)|(?<=\w)_\b", "", " ".join(lines))
        parts = END.sub("\\g<0>\0", plain).split("\0")
        yield from ((number, part.strip(), heading) for part in parts if part.strip())


def docstrings(source: str) -> Iterator[tuple[str, int, int]]:
    """The text, the line and the indentation of each docstring, also below attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value, value.lineno, value.col_offset


def check(path: Path) -> list[str]:
    """One line for each violation, such as `file:line: rule: the sentence`."""
    return check_text(path.read_text(), str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path))


def check_text(text: str, name: str) -> list[str]:
    found, lengths = [], []
    for part in docstrings(text) if name.endswith(".py") else [(text,)]:
        for line, sentence, heading in sentences(*part):
            words = sum(any(c.isalnum() for c in word) for word in sentence.split())
            marks = len(re.findall(r"[:;](?=[\s\"')]|$)", sentence))
            rules = () if ALLOWED.search(sentence) else RULES[:4] + RULES[5:] if heading else RULES
            broken = list(dict.fromkeys(rule for rule, pattern in rules if re.search(pattern, sentence)))
            broken += [f"{marks} colons and semicolons"] * (marks > 1 and not heading)
            broken += [f"{words} words"] * (words > LONGEST)
            found += [f"{name}:{line}: {rule}: {sentence}" for rule in broken]
            lengths += [words] * (words > FRAGMENT and not heading)
    if len(lengths) >= ENOUGH and sum(lengths) > MEAN * len(lengths):
        found.append(f"{name}:1: mean sentence length: {sum(lengths) / len(lengths):.1f} words, at most {MEAN}")
    return found


def all_files() -> list[Path]:
    pages = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "slurm/README.md")]
    pages += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "results").glob("*.md"))
    return pages + [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", [path.relative_to(ROOT).as_posix() for path in all_files()])
def test_reads_as_plain_english(path: str):
    found = check(ROOT / path)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("The time is that of DDP.", "repeat the noun"),
        ("What the all-reduce holds is dropped.", "no 'What X does' as subject"),
        ("It cannot be told from Local-SGD.", "told"),
        ("It merges: the average; then it waits; then it ends.", "3 colons and semicolons"),
        ("word " * 41, "41 words"),
        (("word " * 30 + "end. ") * 5, "mean sentence length"),
    ],
)
def test_refuses(text: str, rule: str):
    page = f"# What a run costs\n\nBy default, `wire; a: b; c` is code.\n\n```\nwire\n```\n\n| wire |\n\n- a: {text}\n"
    (line,) = check_text(page, "p.md")
    assert line.startswith(("p.md:11: " + rule, "p.md:1: " + rule))
    source = f'def f(x):\n    """Returns x.\n\n    >>> wire\n\n    Args:\n        x: {text}\n    """'
    (line,) = check_text(source, "p.py")
    assert line.startswith(("p.py:7: " + rule, "p.py:1: " + rule))


if __name__ == "__main__":
    violations = [line for path in [Path(arg).resolve() for arg in sys.argv[1:]] or all_files() for line in check(path)]
    print(*violations, sep="\n", end="\n" if violations else "")
    sys.exit(bool(violations))
