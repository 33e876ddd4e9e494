"""Layer names in a checkpoint's configuration, to include or to exclude."""

import re
from collections.abc import Iterable

from octavo.errors import UnsupportedModelError

_REGEX = "re:"


class LayerNames:
    """A list of names: `"model.layers.0.mlp.gate_proj" in LayerNames(["mlp"])`.

    A name matches the layer itself, and layers whose dotted names contain it: "lm_head", "layers.0.mlp". After "re:"
    comes a regular expression for the beginning of a layer's name.

    Raises:
        UnsupportedModelError: an invalid regular expression.
    """

    def __init__(self, names: Iterable[str]) -> None:
        plain: list[str] = []
        patterns: list[str] = []
        for name in names:
            (patterns if name.startswith(_REGEX) else plain).append(name.removeprefix(_REGEX))
        self._plain = tuple(f".{name}." for name in plain)
        try:
            self._patterns = tuple(re.compile(pattern) for pattern in patterns)
        except re.error as error:
            raise UnsupportedModelError(
                f"quantization_config: {error.pattern!r} is no regular expression: {error}"
            ) from error

    def __contains__(self, layer: str) -> bool:
        dotted = f".{layer}."
        return any(name in dotted for name in self._plain) or any(pattern.match(layer) for pattern in self._patterns)
