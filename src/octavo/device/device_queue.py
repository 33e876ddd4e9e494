"""What a runner wants of a device that works through a queue while the host goes on."""

from collections.abc import Callable
from typing import Protocol

import torch


class DeviceQueue(Protocol):
    """The order of work on one device. Whatever is launched runs behind what was launched before.

    A kind of device that has none (`DeviceKind.queue`) has done a step when the call returns.
    """

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] of host memory that copies to and from the device need not wait for.

        It is safe to let go of it, or to ask for more, while a copy is under way.
        """
        ...

    def mark(self) -> Callable[[], None]:
        """Mark this place in the queue; the result waits until the device has passed it.

        Raises (when it waits):
            EngineDeadError: the device failed at something before the mark, and will do nothing more.
        """
        ...

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record what `step` launches and return what launches all of it at once.

        `step` is called, also to warm it up, so it must be harmless on the tensors as they are. It may read and write
        only tensors that stay where they are, and must not wait for the device. Captures share one pool of memory: what
        one leaves in tensors that it made is gone with the next.
        """
        ...
