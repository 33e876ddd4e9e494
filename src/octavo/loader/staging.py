"""Tensors on their way to a device: through page-locked memory, so that reading a file and copying overlap.

From ordinary memory a driver copies through a small buffer of its own, and whoever asked waits.
"""

from collections.abc import Callable, Iterator

import torch

_PART_BYTES = 32 << 20  # of page-locked memory at a time; a few are under way


def staged(
    tensors: Iterator[tuple[str, torch.Tensor]],
    device: torch.device,
    host_bytes: Callable[[int], torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same names and tensors, on the device. Copies may be under way: work that is launched waits for them.

    `host_bytes` makes uint8 [n] of host memory, given back when nobody holds it and its copies are done; by default it
    is torch's page-locked memory.
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
