"""The interface of a device that works asynchronously to the host."""

from collections.abc import Callable
from typing import Protocol

import torch


class DeviceQueue(Protocol):
    """The queue of one device. Work runs in launch order.

    On kinds of device without a queue (`DeviceKind.queue` is None), a step is done when the call returns.
    """

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] of pinned host memory for asynchronous copies to and from the device.

        It may be freed, and more may be requested, while a copy is in flight.
        """
        ...

    def mark(self) -> Callable[[], None]:
        """Mark this position in the queue; the returned function waits until the device has passed it.

        Raises (when waiting):
            EngineDeadError: the device failed before the mark and is unusable.
        """
        ...

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record what `step` launches and return a function that launches all of it at once.

        `step` is also called directly for warm-up, so it must be harmless on the current tensors. It may only access
        tensors with fixed addresses and must not wait for the device. Captures share one memory pool: tensors created
        by one capture are overwritten by the next.
        """
        ...
