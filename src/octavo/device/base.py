"""What the device manager wants to know of a kind of device. One file per kind answers it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.device.device_queue import DeviceQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """A moment's reading."""

    total_bytes: int  # what this process may use at most, were nobody else there
    free_bytes: int  # of those, what could be allocated now


class DeviceKind(Protocol):
    """One kind of device, asked about its current one."""

    name: str  # torch's device type
    ranks_share_memory: bool  # several ranks of one host compute in the same memory
    default_memory_utilization: float  # share of the memory that Octavo takes when nobody says

    def is_available(self) -> bool:
        """Say whether this machine, with this build of torch, has such a device."""
        ...

    def prepare(self, index: int) -> None:
        """Settle once what computing on it needs, where this rank is number `index` of its host.

        Raises:
            DeviceUnavailableError: there are fewer devices than ranks.
        """
        ...

    def memory(self) -> DeviceMemory:
        """Read total and free memory."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done."""
        ...

    def queue(self) -> DeviceQueue | None:
        """Return a queue of work that the host need not wait for; None: a call returns when its work is done."""
        ...

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Run something; return the most memory that it held at once. None, and nothing is run, where nobody counts."""
        ...

    def supports(self, dtype: torch.dtype) -> bool:
        """Say whether weights and activations may have this dtype."""
        ...

    def describe(self) -> dict[str, str]:
        """Return facts for people, by name."""
        ...
