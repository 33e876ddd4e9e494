"""The interface of a device kind, implemented in one file per kind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.device.device_queue import DeviceQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """A snapshot of a device's memory."""

    total_bytes: int  # what this process could use if it were alone
    free_bytes: int  # what could be allocated now


class DeviceKind(Protocol):
    """One kind of device; queries are about its current device."""

    name: str  # torch's device type
    ranks_share_memory: bool  # ranks of one host use the same memory
    default_memory_utilization: float  # default fraction of memory that Octavo uses

    def is_available(self) -> bool:
        """Return whether this machine and this build of torch have such a device."""
        ...

    def prepare(self, index: int) -> None:
        """Initialize the device for the rank with number `index` on its host.

        Raises:
            DeviceUnavailableError: fewer devices than ranks.
        """
        ...

    def memory(self) -> DeviceMemory:
        """Read total and free memory."""
        ...

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        ...

    def queue(self) -> DeviceQueue | None:
        """Return a queue for asynchronous work; None if calls return only when their work is done."""
        ...

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Call `run` and return its peak memory usage; None, without a call, if the device does not track it."""
        ...

    def supports(self, dtype: torch.dtype) -> bool:
        """Return whether weights and activations may have this dtype."""
        ...

    def describe(self) -> dict[str, str]:
        """Return a readable description as name-value pairs."""
        ...
