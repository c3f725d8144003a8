"""All results on one page that needs nothing else: Markdown, pictures and style in one HTML file."""

from __future__ import annotations

import base64
import html
import os
import re
from pathlib import Path

import markdown
from markdown.extensions.toc import slugify

from results.collect import overview

FIRST = ("index", "training", "hiding", "seconds", "other_packages", "loss", "compression", "gradient_free", "cost")
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { margin: 0 auto; max-width: 72rem; padding: 0 1rem }
section { overflow-x: auto; border-top: 1px solid #8888; padding: .5rem 0 }
table { border-collapse: collapse; font-size: .875rem }
th, td { border: 1px solid #8886; padding: .2rem .5rem; text-align: left }
img { max-width: 100% }
pre { overflow-x: auto }
nav { columns: 12rem }
nav a { display: block }
"""


def write_page(folder: Path) -> Path:
    """index.html in `folder`, from its Markdown files, those of tables/ last, whose index is counted anew; returns its
    path."""
    if (tables := folder / "tables").is_dir():
        (tables / "index.md").write_text(overview(tables))
    files = [folder / f"{name}.md" for name in FIRST]
    files += sorted({*folder.glob("*.md")} - {*files}) + sorted((folder / "tables").glob("*.md"))
    names = {path: slugify(str(path.relative_to(folder).with_suffix("")), "-") for path in files}
    sections = [_section(path, names) for path in files]
    links = "".join(f'<a href="#{names[path]}">{html.escape(_title(path))}</a>' for path in files)
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
    text = f"<!doctype html><html lang=en>{head}<title>CO2: results</title><style>{STYLE}</style>"
    target = folder / "index.html"
    target.write_text(f"{text}<body><nav>{links}</nav>{''.join(sections)}</body></html>\n")
    return target


def _title(path: Path) -> str:
    """Its heading, or its name: not every table has one."""
    first = path.read_text().partition("\n")[0]
    return first.removeprefix("# ") if first.startswith("# ") else path.stem


def _section(path: Path, names: dict[Path, str]) -> str:
    text = markdown.markdown(path.read_text(), extensions=["tables", "fenced_code"])
    text = re.sub(r'(src|href)="([^"]+)"', lambda found: _reference(path, names, *found.groups()), text)
    title = "" if text.startswith("<h1>") else f"<h2>{html.escape(_title(path))}</h2>"
    return f'<section id="{names[path]}">{title}{text}</section>'


def _reference(path: Path, names: dict[Path, str], kind: str, target: str) -> str:
    """Pictures go in; a page of results is a place on this one; anything else stays a file beside it."""
    if ":" in target:
        return f'{kind}="{target}"'
    file = (path.parent / target.partition("#")[0]).resolve() if not target.startswith("#") else path
    if kind == "src":
        return f'src="data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"'
    for page, name in names.items():
        if page.resolve() == file:
            return f'href="#{name}"'
    return f'href="{os.path.relpath(file, next(iter(names)).parent)}"'
