"""Stages tensors on their way to a device through pinned memory, so that reading a file and copying overlap.

From pageable memory, the driver copies synchronously through a small buffer of its own.
"""

from collections.abc import Callable, Iterator

import torch

_PART_BYTES = 32 << 20  # per pinned buffer; a few are in flight


def staged(
    tensors: Iterator[tuple[str, torch.Tensor]],
    device: torch.device,
    host_bytes: Callable[[int], torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same names and tensors, on the device. Copies may be in flight; later launches are ordered after them.

    `host_bytes` allocates uint8 [n] of host memory, released when it is unreferenced and its copies are done; by
    default torch's pinned memory.
    """
    for name, tensor in tensors:
        yield name, _send(tensor, device, host_bytes or _page_locked)


def _send(tensor: torch.Tensor, device: torch.device, host_bytes: Callable[[int], torch.Tensor]) -> torch.Tensor:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return tensor.to(device)
    on_device = torch.empty_like(tensor, device=device)
    source, target = (each.view(-1).view(torch.uint8) for each in (tensor, on_device))
    for part, place in zip(torch.split(source, _PART_BYTES), torch.split(target, _PART_BYTES), strict=True):
        host = host_bytes(_PART_BYTES)[: len(part)]
        host.copy_(part)
        place.copy_(host, non_blocking=True)
    return on_device


def _page_locked(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
