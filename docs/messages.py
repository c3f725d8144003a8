"""Writes docs/messages.md, every error and warning that a user can meet, from the source: `python docs/messages.py`.

A message is read from the call that makes it. What it fills in stands as an ellipsis; where the text is put together
elsewhere, in a variable or by a function of the project, it is followed there.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("core", "training", "vision", "segmentation", "pointcloud", "language", "reproduce.py")
ERRORS = {"UserError": "error", "CollectiveError": "collective", "DivergedError": "diverged", "warn": "warning"}
ERRORS |= {"ArgumentTypeError": "error"}
FILLED = "…"
MOST = 12  # texts of one call
DEEP = 4  # variables and functions that are followed, one inside another
TITLES = {
    "core": "In your own loop",
    "training": "In every train script",
    "vision": "vision",
    "segmentation": "segmentation",
    "pointcloud": "pointcloud",
    "language": "language",
    "reproduce.py": "reproduce.py",
}
INTRODUCTION = """\
Every error and warning, as the source has them; `python docs/messages.py` writes this page. An ellipsis stands for what
a message fills in: search for the words beside it. Most errors name the remedy themselves, behind the colon. The
frequent ones are explained in [Troubleshooting](troubleshooting.md)."""
KINDS = {
    "error": "",
    "collective": "*a worker or the network failed:* ",
    "diverged": "*the run cannot go on:* ",
    "warning": "*warning:* ",
}
Found = tuple[str, str, str]  # kind, text, file


@cache
def parsed() -> dict[str, ast.Module]:
    """File -> its source, of all places."""
    paths = [ROOT / place for place in PLACES]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in files}


@cache
def functions() -> dict[str, list[ast.FunctionDef]]:
    """Name -> the project's functions of that name."""
    found: dict[str, list[ast.FunctionDef]] = defaultdict(list)
    for tree in parsed().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found[node.name].append(node)
    return found


def called(node: ast.expr) -> str:
    """The last name of what is called."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def texts(node: ast.expr, scopes: list[ast.AST], deep: int = DEEP) -> list[str]:
    """What the expression may say. scopes: where its variables are looked up, the innermost first."""
    if isinstance(node, ast.Constant):
        return [node.value if isinstance(node.value, str) else FILLED]
    if isinstance(node, ast.IfExp):
        return texts(node.body, scopes, deep) + texts(node.orelse, scopes, deep)
    if isinstance(node, ast.BoolOp):
        return [text for value in node.values for text in texts(value, scopes, deep) if text != FILLED] or [FILLED]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return joined([node.left, node.right], scopes, deep)
    if isinstance(node, ast.JoinedStr):
        return joined([v.value if isinstance(v, ast.FormattedValue) else v for v in node.values], scopes, deep)
    if isinstance(node, ast.Starred):
        return texts(node.value, scopes, deep)
    if isinstance(node, ast.List):
        return [text for part in node.elts for text in texts(part, scopes, deep)] or [FILLED]
    if deep and isinstance(node, ast.Name | ast.Attribute):
        found = assigned(called(node), scopes)
        return [text for value in found for text in texts(value, scopes, deep - 1)] or [FILLED]
    if deep == DEEP and isinstance(node, ast.Call) and called(node.func) == "join":  # the whole message: its parts
        return [text for part in node.args for text in texts(part, scopes, deep)]
    if deep and isinstance(node, ast.Call):
        found = [(f, r) for f in functions().get(called(node.func), []) for r in returned(f)]
        return [text for f, r in found[:8] for text in texts(r, [f], deep - 1)] or [FILLED]
    return [FILLED]


def joined(parts: list[ast.expr], scopes: list[ast.AST], deep: int) -> list[str]:
    """The parts one behind the other. What has several texts is filled in where that makes too many."""
    alternatives = [[*dict.fromkeys(texts(part, scopes, deep))] for part in parts]
    if math.prod(map(len, alternatives)) > MOST:
        alternatives = [options if len(options) == 1 else [FILLED] for options in alternatives]
    return ["".join(options) for options in itertools.product(*alternatives)]


@cache
def assignments(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """Variable or attribute -> what it, or an element of it, is set to in there."""
    found: dict[str, list[ast.expr]] = defaultdict(list)
    for node in ast.walk(scope):
        pairs: list[tuple[ast.expr, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.NamedExpr | ast.AnnAssign):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Call) and called(node.func) == "append" and isinstance(node.func, ast.Attribute):
            pairs = [(node.func.value, value) for value in node.args]
        for target, value in pairs:
            for name in names(target):
                found[name] += [value] if value else []
    return found


def assigned(name: str, scopes: list[ast.AST]) -> list[ast.expr]:
    """What it is set to in the innermost scope that sets it."""
    return next((assignments(scope)[name] for scope in scopes if name in assignments(scope)), [])


def names(target: ast.expr) -> list[str]:
    """The names that an assignment to it sets."""
    if isinstance(target, ast.Tuple):
        return [name for part in target.elts for name in names(part)]
    return names(target.value) if isinstance(target, ast.Subscript) else [called(target)]


def returned(function: ast.FunctionDef) -> list[ast.expr]:
    """What it may return, but for calls of itself."""
    values = [node.value for node in ast.walk(function) if isinstance(node, (ast.Return, ast.Yield)) and node.value]
    return [v for v in values if not (isinstance(v, ast.Call) and called(v.func) == function.name)]


def of_call(node: ast.Call, scopes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Kind and text of the messages that a call makes."""
    name = called(node.func)
    if name in ERRORS and node.args:
        for text in texts(node.args[0], scopes):
            yield ERRORS[name], text
    if name == "require" and len(node.args) >= 3:  # of core/config.py and its like: ..., name, remedy
        for text in joined([node.args[-2], ast.Constant(f"={FILLED}: "), node.args[-1]], scopes, DEEP):
            yield "error", text


def messages() -> Iterator[Found]:
    """All of them, in the order of the source."""

    def walk(node: ast.AST, scopes: list[ast.AST], file: str) -> Iterator[Found]:
        inner = [node, *scopes] if isinstance(node, (ast.FunctionDef, ast.Module)) else scopes
        if isinstance(node, ast.Call):
            yield from ((kind, " ".join(text.split()), file) for kind, text in of_call(node, scopes))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inner, file)

    for file, tree in parsed().items():
        yield from walk(tree, [], file)


def page() -> str:
    """The page as Markdown: a section a place, a paragraph a message, and the file that says it."""
    lines = ["# All messages", ""]
    lines += [INTRODUCTION]
    all_found = [*messages()]
    for place in PLACES:
        found = dict.fromkeys(message for message in all_found if message[2].split("/")[0] == place)
        lines += ["", f"## {TITLES[place]}"]
        for kind, text, file in found:
            if any(len(part) > 3 for part in text.split(FILLED)):
                lines += ["", f"- {KINDS[kind]}`` {text} `` ([{file}](../{file}))"]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    Path(ROOT, "docs/messages.md").write_text(page())
