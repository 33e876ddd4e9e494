"""LoRA adapters: how many at once, how large. Options have vLLM's names."""

from dataclasses import dataclass

from octavo.errors import InvalidParameterError

MAX_LORAS = 4
MAX_LORA_RANK = 16
_HOST_COPIES_PER_SLOT = 4
_LARGEST_RANK = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Memory for adapters. `max_loras` slots of `max_lora_rank` are allocated on every rank at start-up.

    Raises:
        InvalidParameterError: names the option, its value and the limit.
    """

    max_loras: int = MAX_LORAS  # slots: different adapters in one step
    max_lora_rank: int = MAX_LORA_RANK
    max_cpu_loras: int  # adapters in each rank's host cache, at least one per slot
    experts: bool = False  # each expert of a mixture has slots, too

    def __post_init__(self) -> None:
        if not 1 <= self.max_lora_rank <= _LARGEST_RANK:
            raise InvalidParameterError("max_lora_rank", self.max_lora_rank, f"between 1 and {_LARGEST_RANK}")
        if self.max_cpu_loras < self.max_loras:
            limit = f"at least max_loras ({self.max_loras}): each adapter in a slot has a copy on the host"
            raise InvalidParameterError("max_cpu_loras", self.max_cpu_loras, limit)

    @classmethod
    def of(
        cls, max_loras: int | None, max_lora_rank: int | None, max_cpu_loras: int | None, *, experts: bool = False
    ) -> "LoraConfig":
        """Fill in defaults for what is None."""
        slots = MAX_LORAS if max_loras is None else max_loras
        return cls(
            max_loras=slots,
            max_lora_rank=MAX_LORA_RANK if max_lora_rank is None else max_lora_rank,
            max_cpu_loras=_HOST_COPIES_PER_SLOT * slots if max_cpu_loras is None else max_cpu_loras,
            experts=experts,
        )
