"""The formats that `octavo convert` writes."""

from dataclasses import dataclass
from types import MappingProxyType

from octavo.errors import InvalidParameterError

# name -> module and function, imported on demand. A function takes a `Checkpoint`, an empty folder and the options.
TARGETS = MappingProxyType(
    {
        "safetensors": ("octavo.convert.folders", "write_safetensors"),
        "pt": ("octavo.convert.folders", "write_torch"),
        "tensorizer": ("octavo.convert.tensorized", "write_tensorized"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetOptions:
    """What a target may be told.

    Raises:
        InvalidParameterError: a value out of range.
    """

    max_shard_bytes: int | None = None  # of weights in one file, which a conversion holds in memory; None: 2 GiB

    def __post_init__(self) -> None:
        if self.max_shard_bytes is not None and self.max_shard_bytes < 1:
            raise InvalidParameterError("max_shard_bytes", self.max_shard_bytes, "at least 1")
