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
LONGEST, MEAN = 40, 20  # words a sentence; the mean is of at least ENOUGH sentences, each of more than FRAGMENT words
ENOUGH, FRAGMENT = 5, 3
PREPOSITIONS = "of|with|in|at|on|from|for|by|to|above|below|before|after|without|under|over|between|near|inside"
PREPOSITIONS += "|that|which|who|whose|where"
NOUN = rf"(?= (?:{PREPOSITIONS}|is|are|was|has|can|may|must|arrives|comes|and|or|but|as|than)\b|'s\b|[.,;:)]|$)"
DETERMINER = "a|an|the|each|every|its|this|that|no|last|next|late|smallest|highest|new|old|whole|outer"
ALONE = "train(?:s|ed|ing)?|runs?|running|ran|works?|leaves?|left|let|stands?|is|are|was|not"
STEMS = "optim|initial|normal|quant|synchron|serial|parallel|general|minim|maxim|summar|recogn|util|regular|token"
BRITISH = "centre|grey|whilst|learnt|licence|artefact|labelled|modelled|behaviour|colour|neighbour|favour|honour"
ALLOWED = re.compile(r"^By (?:default|hand)\b|\bunless .* otherwise\b")  # plain English all the same

# What a rule says to the writer, and its pattern, searched in a sentence on one line.
RULES = [
    ("repeat the noun", r"\b(?:[Tt]hose|(?<!so )[Tt]hat) of\b|\b[Tt]he (?:ones|others)\b|\bwhat of\b"),
    ("repeat the noun", r"\b[Tt]hose (?:that|which|who|whose|with|without|in|at|from)\b"),
    ("repeat the noun", rf"\b[Tt]he one(?: (?:{PREPOSITIONS})\b|[.,;:)]|$)|\b(?:than|from|with|by|like) what\b"),
    ("no 'What X does' as subject", r"^[\"'(]?(?:What|Which)(?! (?:to|is|are|was|does|do)\b)\b(?!:).*(?<!\?)$"),
    ("begins with Of, By, ...", r"^[\"'(]?(?i:of|by|beside|beneath|in it|in them)\b"),
    ("begins with So it is", r"^[\"'(]?(?i:so (?:it )?(?:is|are|was|does|do|has|have|it))\b"),
    ("say 'if you ...'", r"^[\"'(]?(?i:(?:and |but )?who(?:ever|se|m)?)\b.*(?<!\?)$|[;:,] who (?:wants|gives|uses)\b"),
    ("say because", r"[,;] for (?:it|they|we|there|he)\b(?= \w)"),
    ("say next to, during, support, compression, reported, received",
     r"(?i)\b(?:beside|beneath|underneath|knows|wir(?:e|es|ed|ing)|told|hear(?:d|s|ing)?)\b"),
    ("say appear", r"\b(?:stands?|stood) (?:in|at|on|under|by|there|here|above|below|next|before|after|where)\b"),
    ("say need", r"\bwants\b|\b(?:it|which|that|\w+s|[Tt]hey|[Tt]h[eo]se) want\b(?<!users want)(?<!readers want)"),
    ("say use", r"\b(?:takes?|took|taken) (?:tau(?! (?:local )?steps)|int\d|float\d+|bfloat16|(?:the )?settings)\b"),
    ("say differently", r"\botherwise than\b|^(?!.*\b(?:[Ii]f|[Ww]hen|[Uu]nless)\b).*\w (?<!or )otherwise[.,;:)]"),
    ("say different", rf"\b(?:{PREPOSITIONS}|is|are|be|have|has|two|these|more|so|as|most|and|or|very) unlike\b"),
    ("say only", rf"(?<!-)\b(?!(?:{ALONE})\b)[\w)]+ alone\b"),
    ("say average, unless the sentence is on statistics",
     rf"^(?!.*(?:±|deviation|seed|interval|median|variance)).*\b(?i:{DETERMINER}) means?(?<!no means){NOUN}"),
    ("American spelling", rf"(?i)\b(?:\w*(?:{STEMS})is(?:e|es|ed|er|ers|ing|ations?)|(?:{BRITISH})\w*)\b"),
]  # fmt: skip

GONE = r"^ *(```+|~~~+).*?\n(?:.*\n)*? *\1 *$|<!--(?s:.*?)-->|\]\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s+\"[^\"]*\")?\)"
GONE += r"|\]\[[^\]\n]*\]|^\[\^?[\w-]+\]: .*$|</?[a-zA-Z][^<>\n]*>"
CODE = r"(`+)(?!`)(?:(?!\n\s*\n)(?s:.))+?(?<!`)\1(?!`)|\$[^$\s](?:[^$\n]*[^$\s])?\$|<?https?://[^\s>)]*[^\s>).,;:]>?"
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Notes?|Examples?|Warnings?|Shapes?|References):$")
SKIPPED = re.compile(r"$|\||#|>>>|:::")  # blank, table, heading, example, API
ITEM = re.compile(r"(?:[-*+]|\d+[.)]) ")
NAME = r"(?:\*\*[^*]+\*\*|[*\w.\ue000\ue001]+)"
LABEL = re.compile(rf"{NAME}(?:(?:,| and| or) {NAME})*(?: \([^)]*\))?:(?=\s|$)")
END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!\bcf)(?<!\bvs)(?<!\bal)(?<!\b[Nn]o)(?<!\betc)[.!?]+[\"')\]]*\s+")


def sentences(text: str, first: int = 1, base: int = 0) -> Iterator[tuple[int, str]]:
    """The line and the text of each sentence of a page, or of a docstring indented by base, without headings."""
    text = re.sub(GONE, lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE)
    text = re.sub(CODE, lambda m: "\ue0001\ue001" + "\n" * m[0].count("\n"), text)
    blocks: list[tuple[int, list[str]]] = []
    fresh, inside, code = True, False, False  # after a blank line, in a list or a section, in indented code
    for number, line in enumerate(text.split("\n"), first):
        indent, words = len(line) - len(line.lstrip()), line.strip()
        if SKIPPED.match(words) or SECTION.match(words):
            fresh, inside, code = True, inside or bool(SECTION.match(words)), words.startswith(">>>")
            continue
        item = ITEM.match(words)
        inside = bool(item) or (inside and (indent > base or not fresh))
        code = code or (fresh and not inside and indent - base >= 4 and number != first)
        words = words[item.end() :] if item else words
        label = LABEL.match(words) if inside or words[0] in "*\ue000" else None
        if not code and (fresh or item or label):
            blocks.append((number, []))
        if not code:
            blocks[-1][1].append(words[label.end() :].strip() if label else words)
        fresh = False
    for number, lines in blocks:
        plain = re.sub(r"!?\[|\]|\*+(?=\S)|(?<=\S)\*+|\b_(?=\w)|(?<=\w)_\b", "", " ".join(lines))
        yield from ((number, part.strip()) for part in END.sub("\\g<0>\0", plain).split("\0") if part.strip())


def docstrings(source: str) -> Iterator[tuple[str, int, int]]:
    """The text, the line and the indentation of each docstring, also below attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value, value.lineno, value.col_offset


def check(text: str, name: str) -> list[str]:
    """One line for each violation, such as `file:line: rule: the sentence`."""
    found, lengths = [], []
    for part in docstrings(text) if name.endswith(".py") else [(text,)]:
        for line, sentence in sentences(*part):
            words = sum(any(c.isalnum() for c in word) for word in sentence.split())
            marks = len(re.findall(r"[:;](?=[\s\"')]|$)", sentence))
            rules = () if ALLOWED.search(sentence) else RULES
            broken = list(dict.fromkeys(rule for rule, pattern in rules if re.search(pattern, sentence)))
            broken += [f"{marks} colons and semicolons"] * (marks > 1) + [f"{words} words"] * (words > LONGEST)
            found += [f"{name}:{line}: {rule}: {sentence}" for rule in broken]
            lengths += [words] * (words > FRAGMENT)
    if len(lengths) >= ENOUGH and sum(lengths) > MEAN * len(lengths):
        found.append(f"{name}:1: mean sentence length: {sum(lengths) / len(lengths):.1f} words, at most {MEAN}")
    return found


def all_files() -> list[Path]:
    pages = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "slurm/README.md")]
    pages += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "results").glob("*.md"))
    return pages + [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", [path.relative_to(ROOT).as_posix() for path in all_files()])
def test_reads_as_plain_english(path: str):
    found = check((ROOT / path).read_text(), path)
    assert not found, "\n" + "\n".join(found)


if __name__ == "__main__":
    paths = [ROOT / arg for arg in sys.argv[1:]] or all_files()
    violations = [line for path in paths for line in check(path.read_text(), str(path))]
    print(*violations, sep="\n", end="\n" if violations else "")
    sys.exit(bool(violations))
