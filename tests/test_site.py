"""The site's links: pages are written for the repository, and lead to the same places on the site.

`make docs` builds the site, strictly; here is what needs none of its packages.
"""

import re
from pathlib import Path

import pytest
from tools.site.links import PAGES, BrokenLinkError, lines_of, linked_files, place_of, with_pointers, with_site_links

ROOT = Path(__file__).parent.parent
DOCS = {**{f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md")}, **PAGES}


def test_every_link_of_every_page_leads_somewhere() -> None:
    num_links = 0
    for path, place in DOCS.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        num_links += len(re.findall(r"\]\(", with_site_links(text, place)))
    assert num_links > 100


def test_links_hold_on_the_site() -> None:
    text = "[a](docs/api.md#timings) [b](https://x.y) [c](#here) [d](benchmarks/results)"
    assert with_site_links(text, "index.md") == (
        "[a](api.md#timings) [b](https://x.y) [c](#here) [d](benchmarks/results.md)"
    )
    assert with_site_links("[a](../../docs/log.md)", "benchmarks/results.md") == "[a](../log.md)"
    assert with_site_links("[a](../src/octavo/llm.py)", "structure.md") == "[a](source/src/octavo/llm.py.md)"


@pytest.mark.parametrize("link", ["[x](none.md)", "[x](../none.py)"])
def test_a_broken_link_is_found(link: str) -> None:
    with pytest.raises(BrokenLinkError):
        with_site_links(link, "api.md")


def test_paths_in_backticks_are_links_to_the_line() -> None:
    html = "<p><code>engine/core.py</code> <code>EngineCore.step</code>, <code>no/such.py</code></p>"
    line = lines_of("src/octavo/engine/core.py")["EngineCore.step"]
    shown = with_pointers(html, "structure/")
    assert f'href="../source/src/octavo/engine/core.py/#__codelineno-0-{line}"' in shown
    assert "<code>no/such.py</code></p>" in shown
    assert "def step" in (ROOT / "src/octavo/engine/core.py").read_text().splitlines()[line - 1]


def test_sources_that_a_page_points_to_get_pages() -> None:
    text = (ROOT / "docs/request.md").read_text()
    files = linked_files(text, "request.md")
    assert "src/octavo/engine/core.py" in files
    assert place_of("src/octavo/engine/core.py") == "source/src/octavo/engine/core.py.md"


def test_the_navigation_names_pages_that_exist() -> None:
    named = re.findall(r"[\w/-]+\.md", re.sub(r"^ *#.*", "", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    made = {"reference/commands.md", "reference/python.md"}
    assert {*named} - made - {*DOCS.values()} == set()
