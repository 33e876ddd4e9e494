"""Which of Octavo's extras are installed."""

from importlib.metadata import PackageNotFoundError, requires, version
from re import match

_FOR_DEVELOPERS = frozenset({"test", "benchmark", "docs"})


def extras() -> str:
    """Say which extras are installed, and which are not, by what the installed package names."""
    needed: dict[str, list[str]] = {}
    for text in requires("octavo") or ():
        found = match(r"([\w.-]+).*;.*\bextra == ['\"]([\w-]+)['\"]", text)
        if found is not None and found[2] not in _FOR_DEVELOPERS:
            needed.setdefault(found[2], []).append(found[1])
    here = sorted(extra for extra, packages in needed.items() if all(map(_is_installed, packages)))
    missing = sorted({*needed} - {*here})
    return f"{', '.join(here) or 'none'}; not installed: {', '.join(missing) or 'none'}"


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
