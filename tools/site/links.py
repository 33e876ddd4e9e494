"""Where files of the repository are on the site, and links between them.

Pages are written for the repository: their links are relative paths in it. On the site, a file is one of its pages, a
download, or a page that shows the source.
"""

import ast
import posixpath
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "src/octavo"
# Files outside docs/ that are pages.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/results/README.md": "benchmarks/results.md",
    "benchmarks/peers/README.md": "benchmarks/peers.md",
    "src/octavo/demo/README.md": "demo.md",
    "src/octavo/demo/vl/README.md": "demo-vl.md",
}
DOWNLOADS = ("benchmarks/results/", "deploy/", "docs/")
PLOTS = "docs/plots/"  # in no folder of the repository: tools/site/plots.py draws them
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
# A path in backticks, and after it, where there is one, a name that the file defines: see tests/test_docs.py.
_POINTER = re.compile(r"<code>((?:\w+/)*\w+\.py)</code>(?:(\s+)<code>([A-Za-z_][\w.]*)(?:\(\))?</code>)?")
_POINTER_IN_MARKDOWN = re.compile(r"`((?:\w+/)*\w+\.py)`")


class BrokenLinkError(Exception):
    """A link that leads nowhere."""


def place_of(path: str) -> str:
    """Return where a file of the repository is in the site's folder of sources. Raises BrokenLinkError."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith(PLOTS):
        return path.removeprefix("docs/")
    if not (ROOT / path).is_file():
        raise BrokenLinkError(f"no such file: {path}")
    if path.endswith(".md") and path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith(DOWNLOADS):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def repository_path(place: str) -> str:
    """Return the file of the repository that a page of the site is made of."""
    made = {page: path for path, page in PAGES.items()}
    return made.get(place, f"docs/{place}")


def with_site_links(text: str, place: str) -> str:
    """Return a page's Markdown with links that hold on the site. Raises BrokenLinkError."""
    folder = posixpath.dirname(repository_path(place))

    def on_site(found: re.Match[str]) -> str:
        target = found[2]
        if re.match(r"[a-z]+:", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if (ROOT / path).is_dir():
            path = f"{path}/README.md"
        return found[1] + posixpath.relpath(place_of(path), posixpath.dirname(place) or ".") + found[3]

    return _LINK.sub(on_site, text)


def linked_files(text: str, place: str) -> set[str]:
    """Return the files of the repository that a page links to, or points to in backticks."""
    folder = posixpath.dirname(repository_path(place))
    links = (posixpath.normpath(posixpath.join(folder, found[2])) for found in _LINK.finditer(text))
    paths = {path for path in links if (ROOT / path).is_file()}
    return paths | {path for name in _POINTER_IN_MARKDOWN.findall(text) if (path := source_of(name)) is not None}


def source_of(pointer: str) -> str | None:
    """Return the file that a path in backticks means: below the package, or from the root; None: neither."""
    return next((path for path in (f"{PACKAGE}/{pointer}", pointer) if (ROOT / path).is_file()), None)


def with_pointers(html: str, url: str) -> str:
    """Return a page's HTML where paths in backticks, and the names after them, are links to pages of sources."""

    def linked(found: re.Match[str]) -> str:
        pointer, space, name = found.groups()
        path = source_of(pointer)
        if path is None:
            return found[0]
        to = posixpath.relpath(f"source/{path}/", url or ".") + "/"
        shown = f'<a href="{to}"><code>{pointer}</code></a>'
        if name is None:
            return shown
        line = lines_of(path).get(name)
        anchor = "" if line is None else f"#__codelineno-0-{line}"
        return f'{shown}{space}<a href="{to}{anchor}"><code>{name}</code></a>'

    return _POINTER.sub(linked, html)


@cache
def lines_of(path: str) -> dict[str, int]:
    """Return the line on which each function, class, constant and, as `Class.member`, member of a file begins."""
    lines: dict[str, int] = {}
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        lines |= _names(node)
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                lines |= {f"{node.name}.{name}": line for name, line in _names(member).items()}
    return lines


def _names(node: ast.AST) -> dict[str, int]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name: node.lineno}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id: node.lineno}
    if isinstance(node, ast.Assign):
        return {target.id: node.lineno for target in node.targets if isinstance(target, ast.Name)}
    return {}


def source_page(path: str) -> str:
    """Return the page that shows a source file, with an anchor for each line."""
    text = (ROOT / path).read_text(encoding="utf-8")
    language = {".py": "python", ".cpp": "cpp", ".h": "cpp"}.get(Path(path).suffix, "text")
    return f'---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n~~~~~~ {{.{language} linenums="1"}}\n{text}\n~~~~~~\n'
