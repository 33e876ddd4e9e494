"""The documents are true: every file and name that they point to exists. `tests/test_readme.py` runs the README.

In `DOCUMENTS` a pointer is a path below src/octavo/ in backticks, and after it, where there is one, a name that the
file defines: `engine/core.py` `EngineCore.step`.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
POINTER = re.compile(r"`((?:[\w]+/)*\w+\.py)`(?: `([A-Za-z_][\w.]*)(?:\(\))?`)?")
DOCUMENTS = ["docs/structure.md", "docs/source-map.md", "docs/request.md", "CONTRIBUTING.md"]


@cache
def names_defined_in(path: Path) -> set[str]:
    """Return functions, classes, constants and, as `Class.member`, what classes define or set on themselves."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        names |= _own_names(node)
        if isinstance(node, ast.ClassDef):
            members = set().union(*(_own_names(member) for member in node.body)) | _set_on_self(node)
            names |= {f"{node.name}.{member}" for member in members}
    return names


def _own_names(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


def _set_on_self(node: ast.ClassDef) -> set[str]:
    return {
        name.attr
        for name in ast.walk(node)
        if isinstance(name, ast.Attribute) and isinstance(name.ctx, ast.Store) and ast.unparse(name.value) == "self"
    }


def pointers(text: str) -> list[tuple[str, str]]:
    return POINTER.findall(text)


def is_broken(path: str, name: str) -> bool:
    """Whether a pointer leads nowhere. Paths outside the package are given from the root of the repository."""
    file = ROOT / "src/octavo" / path if (ROOT / "src/octavo" / path).exists() else ROOT / path
    return not file.exists() or (bool(name) and name not in names_defined_in(file))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_pointers_lead_somewhere(document: str) -> None:
    found = pointers((ROOT / document).read_text())
    assert len(found) >= 10
    assert [pointer for pointer in found if is_broken(*pointer)] == []


def test_a_wrong_pointer_is_found() -> None:
    (missing_file, missing_name, right) = pointers(
        "`no/such.py` and `errors.py` `NoSuchError` and `errors.py` `UserError`"
    )
    assert is_broken(*missing_file)
    assert is_broken(*missing_name)
    assert not is_broken(*right)
