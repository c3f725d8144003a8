"""A hook of mkdocs: pages link to the repository's files as they do on a code host, by relative paths.

results/ becomes part of the site. A link to any other file outside docs/ goes to the code host where CO2_REPOSITORY has
its address, such as https://HOST/OWNER/NAME/blob/main; else only its text stays.
"""

import os
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (".md", ".png", ".svg")  # of results/
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
FENCED = re.compile(r"^(\s*)(```|~~~).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds what of results/ can be shown."""
    for path in sorted((ROOT / "results").rglob("*")):
        if path.suffix in SHOWN:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turns links into the site's, outside code blocks."""
    place = page.file.src_uri
    source = PurePosixPath(place if place.startswith("results/") else f"docs/{place}")
    known = {file.src_uri for file in files}

    def turned(link: re.Match[str]) -> str:
        picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        if ":" in target or target.startswith("/"):
            return link[0]
        wanted = normpath(f"{source.parent}/{target}")
        if not (ROOT / wanted).exists():
            return link[0]  # mkdocs says so
        uri = wanted.removeprefix("docs/")
        if uri in known:
            return f"{picture}[{text}]({relpath(uri, PurePosixPath(place).parent)}{anchor})"
        host = os.environ.get("CO2_REPOSITORY", "")
        return f"[{text}]({host}/{wanted})" if host else text

    parts, end = [], 0
    for block in FENCED.finditer(markdown):
        parts += [LINK.sub(turned, markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, LINK.sub(turned, markdown[end:])])
