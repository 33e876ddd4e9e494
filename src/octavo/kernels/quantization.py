"""What `quantization=` means: in which integers the weights of linear maps are kept.

w is about scale * q: q an integer of 8 bits in -127 ... 127, or of 4 bits in -8 ... 7, with a scale for each output and
group of inputs. Activations meet them as integers too, each row by max|x| / 127. Embeddings and norms stay as they are.

Legend: N = outputs, K = inputs, G = groups of inputs.
"""

from dataclasses import dataclass
from types import MappingProxyType

import torch

from octavo.errors import InvalidParameterError

_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerFormat:
    """How one weight [N, K] becomes integers."""

    bits: int  # 8 or 4
    group_size: int | None  # inputs that share a scale: 32, 64 or 128; None: all of them

    def num_groups(self, in_size: int) -> int:
        """Return G."""
        return 1 if self.group_size is None else -(-in_size // self.group_size)

    def num_bytes(self, num_outputs: int, in_size: int) -> int:
        """Return what a weight [N, K] takes with its scales."""
        return num_outputs * (in_size * self.bits // 8 + self.num_groups(in_size) * _SCALE_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedWeight:
    """A weight that has become integers, in the plain layout: w = scale * q + offset."""

    format: IntegerFormat
    values: torch.Tensor  # [N, K] int8, q
    scales: torch.Tensor  # [N, G] float32
    offsets: torch.Tensor | None = None  # [N, G] float32; None: zeros

    def dequantized(self) -> torch.Tensor:
        """Return the weight [N, K] that is meant, in float32."""
        in_size = self.values.shape[1]
        group_size = self.format.group_size or in_size
        scales = self.scales.repeat_interleave(group_size, dim=1)[:, :in_size]  # [N, K]
        weight = scales * self.values
        if self.offsets is not None:
            weight += self.offsets.repeat_interleave(group_size, dim=1)[:, :in_size]
        return weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """A choice for a whole model."""

    name: str
    linear: IntegerFormat  # all maps of the layers
    logits: IntegerFormat  # the last one, to logits


_INT8 = IntegerFormat(bits=8, group_size=None)
# Groups of 128 in the layers: of 32 they would halve the divergence from bfloat16 (0.0002 nats instead of 0.0005, see
# benchmarks/results), and cost 18 % more bytes. The logits take groups of 32: as good as 8 bits, for 0.6 of the bytes.
_INT4 = IntegerFormat(bits=4, group_size=128)
QUANTIZATIONS = MappingProxyType(
    {
        "int8": Quantization(name="int8", linear=_INT8, logits=_INT8),
        "int4": Quantization(name="int4", linear=_INT4, logits=IntegerFormat(bits=4, group_size=32)),
    }
)


def get_quantization(name: str) -> Quantization:
    """Return the quantization called `name`.

    Raises:
        InvalidParameterError: there is none.
    """
    if name not in QUANTIZATIONS:
        raise InvalidParameterError("quantization", name, "one of " + ", ".join(QUANTIZATIONS))
    return QUANTIZATIONS[name]
