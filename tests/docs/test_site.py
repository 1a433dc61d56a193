"""The built site: strict, with working links, complete, and with nothing loaded from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

import phalanx as px
from tests.docs.pages import DOCS, ROOT

pytestmark = pytest.mark.slow  # `make check` runs it by its name

#: Attributes through which a page loads resources, unlike links that a reader follows.
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
FETCHES = ("preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload")
STATIC = (*FETCHES, "stylesheet", "icon", "manifest")


class Loaded(HTMLParser):
    """Parser for the resources that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in LOADS:
            self.found.append(given.get(LOADS[tag]) or "")
        if tag == "link" and any(kind in STATIC for kind in (given.get("rel") or "").split()):
            self.found.append(given.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def test_pages_style_sheets_and_pictures_load_nothing_from_other_hosts(site: Path) -> None:
    found: dict[str, list[str]] = {}
    for page in site.rglob("*.html"):
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        found[page.name] = loaded.found
    assert sum(map(len, found.values())) > 100  # style sheets and scripts of every page were seen

    sheets = [*site.rglob("*.css"), *site.rglob("*.svg")]
    loads = re.compile(r"""(?:url\(\s*|@import\s+|<image [^>]*href=)["']?([^"')\s]+)""")
    assert sheets
    found |= {sheet.name: loads.findall(sheet.read_text(encoding="utf-8")) for sheet in sheets}
    assert not [(name, one) for name, all_ in found.items() for one in all_ if re.match(r"(https?:)?//", one)]


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))

    submodules = [name for name in px.__all__ if isinstance(getattr(px, name), ModuleType)]
    names = [name for name in px.__all__ if name not in submodules]
    names += [
        f"{module}.{name}" for module in submodules for name in getattr(getattr(px, module), "__all__", ())
    ]
    own = [name for name in names if not name.startswith("errors.")]
    assert [name for name in own if f'id="phalanx.{name}"' not in anchors] == []


def test_every_environment_variable_is_on_its_page() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "phalanx").rglob("*.py"))
    page = (DOCS / "reference" / "environment.md").read_text(encoding="utf-8")

    assert [
        name for name in sorted(set(re.findall(r"PHALANX_[A-Z_]+[A-Z]", source))) if f"`{name}`" not in page
    ] == []


def test_every_diagram_is_part_of_its_page(site: Path) -> None:
    names = [path.stem for path in (DOCS / "assets" / "diagrams").glob("*.svg")]
    pages = "".join(page.read_text(encoding="utf-8") for page in site.rglob("*.html"))

    assert names
    assert pages.count('<figure class="diagram"') >= len(names)
    assert "diagrams/" not in "".join(re.findall(r"<img[^>]*>", pages))
