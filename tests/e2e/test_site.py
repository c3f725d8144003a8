"""The documentation site as a browser shows it, wide and on a phone; needs chromium, which setup does not install."""

import functools
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.imports import ROOT

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.slow
PAGES = ["index", "choosing", "integrations", "api", "design", "results/index", "results/loss"]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["wide", "phone"])
@pytest.mark.parametrize("page", PAGES)
def test_a_browser_shows_the_page_without_an_error(page: str, size: tuple[int, int], address: str, tmp_path: Path):
    """Its pixels go to the temporary folder: look at them there (pytest --basetemp FOLDER)."""
    url = f"{address}/{page}.html"
    picture = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={size[0]},{size[1]}"]
    command = [str(BROWSER), *options, "--virtual-time-budget=5000", f"--screenshot={picture}"]
    ended = subprocess.run([*command, url], capture_output=True, text=True, timeout=60)
    told = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    assert ended.returncode == 0 and not told, told
    pixels = np.asarray(Image.open(picture).convert("L"))
    assert pixels.shape == (size[1], size[0]) and pixels.std() > 10  # something is written there
