"""How many bits each layer gets."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from octavo.errors import InvalidParameterError
from octavo.layers.quant.names import LayerNames
from octavo.layers.quant.octavo import FORMS

# Layers that are merged need one form.
_COMPUTED_AS_ONE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, kw_only=True, slots=True)
class BitsPlan:
    """Bits of every layer: `bits`, but for layers whose name contains a key of `bits_for`.

    Raises:
        InvalidParameterError: a number of bits that is not supported.
    """

    bits: int = 4
    bits_for: Mapping[str, int] = field(default_factory=dict)  # by name or part of one: "down_proj", "layers.0.mlp"

    def __post_init__(self) -> None:
        for bits in (self.bits, *self.bits_for.values()):
            if bits not in FORMS:
                raise InvalidParameterError("bits_for", bits, "one of " + ", ".join(map(str, sorted(FORMS))))

    @classmethod
    def parse(cls, text: str) -> "BitsPlan":
        """Read "down_proj=8,lm_head=8"; empty: 4 bits for all.

        Raises:
            InvalidParameterError: malformed.
        """
        bits_for: dict[str, int] = {}
        for entry in filter(None, text.split(",")):
            name, _, bits = entry.partition("=")
            if not name or not bits.isdecimal():
                raise InvalidParameterError("bits_for", entry, "NAME=BITS, such as down_proj=8")
            bits_for[name] = int(bits)
        return cls(bits_for=bits_for)

    def of_layers(self, layers: Iterable[str]) -> dict[str, int]:
        """Return the bits of each layer of a model, by checkpoint name.

        Raises:
            InvalidParameterError: a name that matches no layer.
        """
        layers, result = list(layers), {}
        named = {name: LayerNames([name]) for name in self.bits_for}
        for name, matches in named.items():
            if not any(layer in matches for layer in layers):
                raise InvalidParameterError(
                    "bits_for", name, "a part of some layer's name, such as down_proj or lm_head"
                )
        for layer in layers:
            found = [bits for name, bits in self.bits_for.items() if any(one in named[name] for one in _as_one(layer))]
            result[layer] = max(found, default=self.bits)
        return result


def _as_one(layer: str) -> list[str]:
    """Return the names of all layers that are merged with this one."""
    stem, _, part = layer.rpartition(".")
    for parts in _COMPUTED_AS_ONE:
        if part in parts:
            return [f"{stem}.{one}" for one in parts]
    return [layer]
