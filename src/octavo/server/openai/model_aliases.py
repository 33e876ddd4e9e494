"""`ModelAliases`: further names for models and adapters, for clients that ask for models of their own provider."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from octavo.errors import InvalidParameterError

_OPTION = "model_alias"


class ModelAliases:
    """The values of `model_alias`: `NAME=MODEL`, where a `*` in NAME stands for any text. The first that fits wins."""

    def __init__(self, values: Sequence[str]) -> None:
        self._targets: list[tuple[str, str]] = []
        for value in values:
            name, _, target = value.partition("=")
            self._targets.append((name.casefold(), target))

    def target(self, name: str) -> str | None:
        """Return the model that a name stands for, in any case; None: it is no alias."""
        key = name.casefold()
        return next((target for alias, target in self._targets if fnmatchcase(key, alias)), None)

    def check(self, known: Sequence[str]) -> None:
        """Raise InvalidParameterError: an alias leads to none of these names."""
        for alias, target in self._targets:
            if target.casefold() not in known:
                limit = f"no model or adapter of this server is called {target!r}"
                raise InvalidParameterError(_OPTION, f"{alias}={target}", limit)
