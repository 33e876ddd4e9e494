"""Which layers a checkpoint's configuration includes or excludes: names in every spelling that tools write."""

import fnmatch
import re
from collections.abc import Iterable
from types import MappingProxyType

from octavo.config.json_fields import JsonFields
from octavo.errors import UnsupportedModelError
from octavo.kernels.quantization import WeightFormat
from octavo.kernels.types import LinearRole
from octavo.layers.quant.base import DENSE, WeightScheme

_REGEX = "re:"
_EXCLUDING_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore")
# What a layer's name, of models of text alone, begins with; and where models of text and pictures have it.
_PREFIX = re.compile(r"^(model\.)?language_model\.(model\.)?")
_INSIDE = MappingProxyType(
    {
        "model.": ("model.language_model.", "language_model.model.", "language_model.", "model.language_model.model."),
        "lm_head": ("language_model.lm_head", "model.lm_head", "model.language_model.lm_head"),
    }
)
_FUSED = MappingProxyType(
    {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    }
)


class LayerNames:
    """A list of names: `"model.layers.0.mlp.gate_proj" in LayerNames(["mlp"])`.

    A name matches layers whose name contains it, as in AutoAWQ and transformers, but "layers.1" not layer 10, and
    "mlp.gate", a router, not "mlp.gate_proj". After "re:" comes a regular expression for the beginning of a layer's
    name. A layer has the name that it has in a model of text and pictures, too, and that of the layer that engines
    merge it into ("qkv_proj").
    """

    def __init__(self, names: Iterable[str]) -> None:
        try:
            known = [_Name(name) for name in names if name.strip(".")]
        except re.error as error:
            why = f"{error.pattern!r} is no regular expression: {error}"
            raise UnsupportedModelError(f"quantization_config: {why}") from error
        self._plain = tuple((name.text, name) for name in known if not name.is_whole)
        self._has_fused = any(name.is_fused for name in known)
        self._whole = tuple(name for name in known if name.is_whole)

    @classmethod
    def excluded(cls, fields: JsonFields) -> "LayerNames":
        """Read the layers that are not quantized, under whatever key. Raises CheckpointError: no list of names."""
        return cls(name for key in _EXCLUDING_KEYS if key in fields for name in fields.texts(key))

    def __contains__(self, layer: str) -> bool:
        fused = _fused(layer) if self._has_fused else []
        names = _spellings(layer) if self._whole else []
        if any(name.matches(fused if name.is_fused else names) for name in self._whole):
            return True
        # Files list hundreds of names, and models have tens of thousands of experts' layers: the quick test first.
        own = "\n".join((layer, *fused))
        return any(name.matches(fused if name.is_fused else [layer]) for text, name in self._plain if text in own)


class _Name:
    """One name of a list."""

    def __init__(self, name: str) -> None:
        self.is_whole = name.startswith(_REGEX) or "*" in name  # it stands for whole names, not for a part of them
        # As layers inside a larger model are called in a model of text alone.
        inner = _PREFIX.sub("model.", f"{name.strip('.')}.")
        self.text = inner.replace("model.lm_head.", "lm_head.").removesuffix(".")
        if name.startswith(_REGEX):
            pattern = name.removeprefix(_REGEX)
        else:
            pattern = fnmatch.translate(name) if self.is_whole else _containing(self.text)
        self._pattern = re.compile(pattern)
        self._is_negative = self.is_whole and "(?!" in pattern  # it excludes spellings: it must not meet any
        self.is_fused = any(fused in name for fused in _FUSED.values())

    def matches(self, names: list[str]) -> bool:
        found = self._pattern.match if self.is_whole else self._pattern.search
        return bool(names) and (all if self._is_negative else any)(found(name) is not None for name in names)


def _containing(name: str) -> str:
    """Return a regular expression for names that contain this one, with numbers and routers whole."""
    before = r"(?<!\d)" if name[0].isdigit() else ""
    after = r"(?!\d)" if name[-1].isdigit() else r"(?![^.])" if name.rsplit(".", maxsplit=1)[-1] == "gate" else ""
    return before + re.escape(name) + after


def _spellings(layer: str) -> list[str]:
    """Return a layer's name, and those that it has inside a larger model."""
    start = next((start for start in _INSIDE if layer.startswith(start)), "")
    return [layer, *(inside + layer.removeprefix(start) for inside in _INSIDE.get(start, ()))]


def _fused(layer: str) -> list[str]:
    """Return the names of the layer that a layer is merged into."""
    stem, _, last = layer.rpartition(".")
    without_number = re.sub(r"\.experts\.\d+$", ".experts", stem)
    if last not in _FUSED:
        return []
    return [name for base in dict.fromkeys((stem, without_number)) for name in _spellings(f"{base}.{_FUSED[last]}")]


class UniformSchemes:
    """One scheme for all linears of decoder blocks, except for `excluded` ones; see `Schemes`."""

    def __init__(self, name: str, scheme: WeightScheme, excluded: LayerNames, *, has_head: bool = False) -> None:
        """`has_head`: the logits head is no exception."""
        self.name, self._scheme, self._excluded, self._has_head = name, scheme, excluded, has_head
        self.forms: frozenset[WeightFormat | None] = frozenset({None, scheme.form})

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        is_dense = role == "router" or (role == "logits" and not self._has_head) or layer in self._excluded
        return DENSE if is_dense else self._scheme
