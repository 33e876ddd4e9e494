"""What mkdocs calls: adds the pages that are made of the code, of files outside docs/ and of benchmark results.

Run mkdocs in the repository's root, by `python -m mkdocs`, so that this package is found: `make docs`.
"""

import logging
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from tools.site import links

logger = logging.getLogger("mkdocs.hooks.octavo")  # its warnings fail a strict build


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add pages of docs/ that the navigation does not name to its features."""
    named = set(_names(config.nav))
    [features] = [section["Features"] for section in config.nav or [] if "Features" in section]
    features += sorted(path.name for path in (links.ROOT / "docs").glob("*.md") if path.name not in named)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add all pages that are not in docs/."""
    from tools.site.commands import commands_page
    from tools.site.plots import plots
    from tools.site.python_page import python_page

    for path, place in links.PAGES.items():
        files.append(File.generated(config, place, content=(links.ROOT / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    files.append(File.generated(config, "reference/python.md", content=python_page()))
    for name, data in plots().items():
        files.append(File.generated(config, f"plots/{name}", content=data))
    linked = {path for page in files.documentation_pages() for path in _linked(page)}
    for path in sorted(linked):
        place = links.place_of(path)
        if files.get_file_from_path(place) is not None:
            continue
        if place.startswith("source/"):
            files.append(File.generated(config, place, content=links.source_page(path)))
        else:
            files.append(File.generated(config, place, content=(links.ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links within the repository into links within the site."""
    if _is_made(page.file.src_uri):
        return markdown
    try:
        return links.with_site_links(markdown, page.file.src_uri)
    except links.BrokenLinkError as error:
        logger.warning("%s: %s", page.file.src_uri, error)
        return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn paths of sources in backticks into links."""
    return html if page.file.src_uri.startswith("source/") else links.with_pointers(html, page.url)


def _names(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    if isinstance(nav, dict):
        return [name for entry in nav.values() for name in _names(entry)]
    return [name for entry in nav or () for name in _names(entry)]


def _is_made(place: str) -> bool:
    """Whether a page is made of the code, so that its links are the site's already."""
    return place.startswith(("source/", "reference/"))


def _linked(page: File) -> set[str]:
    return set() if _is_made(page.src_uri) else links.linked_files(page.content_string, page.src_uri)
