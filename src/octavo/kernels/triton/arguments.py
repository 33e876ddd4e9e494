"""How launchers prepare tensors before a kernel gets their addresses."""

from torch import Tensor

_ALIGNMENT = 16  # bytes: aligned addresses get a compiled variant of their own


def aligned(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy of it aligned to 16 bytes.

    Triton specializes kernels on alignment, which changes how a row is spread over threads and so the order of a sum: a
    row's bits must not depend on where its tensor happens to begin.
    """
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()
