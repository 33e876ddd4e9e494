"""Options of the formats that `octavo convert` writes."""

from dataclasses import dataclass
from types import MappingProxyType

from octavo.errors import InvalidParameterError

SINGLE_FILES = MappingProxyType({"gguf": "model.gguf"})  # formats that are a file instead of a folder


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetOptions:
    """What the writer of a format takes.

    Raises:
        InvalidParameterError: a value out of range.
    """

    max_shard_bytes: int | None = None  # of weights in one file, which a conversion holds in memory; None: 2 GiB

    tensor_parallel_size: int | None = None  # ranks that a sharded state is for; None: 1

    gguf_type: str | None = None  # of matrices in a GGUF file, such as Q8_0; None: the dtype that they have

    def __post_init__(self) -> None:
        for name in ("max_shard_bytes", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameterError(name, value, "at least 1")

    def refuse(self, to: str, *names: str) -> None:
        """Check that options are not given, as they have no effect on a format.

        Raises:
            InvalidParameterError: one is.
        """
        for name in names:
            if (value := getattr(self, name)) is not None:
                raise InvalidParameterError(name, value, f"unset: it has no effect on {to}")
