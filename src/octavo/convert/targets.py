"""The formats that `octavo convert` writes."""

from dataclasses import dataclass
from types import MappingProxyType

from octavo.errors import InvalidParameterError

# name -> module and function, imported on demand. A function takes a `Checkpoint`, an empty folder and the options.
TARGETS = MappingProxyType(
    {
        "safetensors": ("octavo.convert.folders", "write_safetensors"),
        "pt": ("octavo.convert.folders", "write_torch"),
        "sharded_state": ("octavo.convert.sharded", "write_sharded"),
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

    tensor_parallel_size: int | None = None  # ranks that a sharded state is for; None: 1

    def __post_init__(self) -> None:
        for name in ("max_shard_bytes", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameterError(name, value, "at least 1")

    def refuse(self, name: str, to: str) -> None:
        """Check that an option is not given, as it has no effect on a format.

        Raises:
            InvalidParameterError: it is.
        """
        if (value := getattr(self, name)) is not None:
            raise InvalidParameterError(name, value, f"unset: it has no effect on {to}")
