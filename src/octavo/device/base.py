"""What varies between kinds of devices: `DeviceKind`, and the queue of those that work asynchronously to the host."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """A snapshot of a device's memory."""

    total_bytes: int  # what this process could use if it were alone
    free_bytes: int  # what could be allocated now


class DeviceQueue(Protocol):
    """The queue of one device. Work runs in launch order."""

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] of pinned host memory for asynchronous copies to and from the device.

        It may be freed, and more may be requested, while a copy is in flight.
        """

    def mark(self) -> Callable[[], None]:
        """Mark this position in the queue; the returned function waits until the device has passed it.

        Raises (when waiting):
            EngineDeadError: the device failed before the mark and is unusable.
        """

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record what `step` launches and return a function that launches all of it at once.

        `step` is also called directly for warm-up, so it must be harmless on the current tensors. It may only access
        tensors with fixed addresses and must not wait for the device. Captures share one memory pool: tensors created
        by one capture are overwritten by the next.
        """


class DeviceKind(ABC):
    """One kind of device; queries are about its current device. What a kind does not override, it does not need."""

    name: str  # torch's device type
    ranks_share_memory: bool  # ranks of one host use the same memory
    default_memory_utilization: float  # default fraction of memory that Octavo uses

    @abstractmethod
    def is_available(self) -> bool:
        """Return whether this machine and this build of torch have such a device."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Read total and free memory."""

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """Return whether weights and activations may have this dtype."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Return a readable description as name-value pairs."""

    def prepare(self, index: int) -> None:  # noqa: B027 - a default
        """Initialize the device for the rank with number `index` on its host. Raises DeviceUnavailableError."""

    def synchronize(self) -> None:  # noqa: B027 - a default
        """Wait until all queued work is done."""

    def queue(self) -> DeviceQueue | None:
        """Return a queue for asynchronous work; None if a step is done when the call returns."""
        return None

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Call `run` and return its peak memory usage; None, without a call, if the device does not track it."""
        return None
