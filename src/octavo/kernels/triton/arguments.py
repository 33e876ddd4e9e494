"""What launchers do with tensors before a kernel gets their addresses."""

import torch

_ALIGNMENT = 16  # bytes: what Triton compiles a variant of its own for


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy of it in one piece at a multiple of 16 bytes.

    Triton lays a row out in threads by what it knows of addresses, and the order of a sum follows: a row must not get
    other bits where a tensor happens to begin elsewhere.
    """
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()
