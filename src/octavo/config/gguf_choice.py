"""Chooses one of several models in a folder of GGUF files: many repositories have one file per quantization."""

import re
from collections.abc import Iterable

from octavo.errors import ModelNotFoundError

_PART = re.compile(r"-(?P<number>\d{5})-of-\d{5}$")
_NO_MODELS = re.compile(r"(?:^|/)(?:mmproj|imatrix)[^/]*$", re.IGNORECASE)  # image encoders, and statistics
_SUFFIX = ".gguf"


def choose_gguf(names: Iterable[str], tag: str | None, where: str) -> list[str]:
    """Return the names of one model's files, the first part of a split one first; empty if there are no GGUF files.

    `tag` is the end of a name before .gguf and the number of a part, such as Q4_K_M; case does not matter. None: there
    must be one model only.

    Raises:
        ModelNotFoundError: no model or several match; lists what there is.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(_SUFFIX) and not _NO_MODELS.search(name):
            models.setdefault(_PART.sub("", name.removesuffix(_SUFFIX)), []).append(name)
    found = [parts for stem, parts in models.items() if tag is None or _matches(stem, tag)]
    if len(found) == 1 or not models:
        return found[0] if found else []
    listed = ", ".join(parts[0] for parts in found or models.values())
    which = f"no model called {tag!r}" if not found else "several models"
    hint = f"the end of its name after a colon ({where}:Q4_K_M) names one, too"
    raise ModelNotFoundError(f"{where!r} has {which}; name one of its files: {listed}; {hint}")


def _matches(stem: str, tag: str) -> bool:
    """Return whether a file's name, or the whole of it, ends with a tag."""
    return re.search(rf"(?:^|[-._/]){re.escape(tag)}$", stem, re.IGNORECASE) is not None
