"""When to use the Triton kernels. Does not import Triton: that costs half a second and must know first how to run."""

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch

from octavo.errors import InvalidParameterError, UnknownOptionError

logger = logging.getLogger(__name__)

_VARIABLE = "OCTAVO_GPU_KERNELS"  # triton, or torch: use torch's ops
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


def uses_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the Triton kernels run here: on a GPU unless disabled, on a CPU if requested and interpreted.

    Raises:
        UnknownOptionError: OCTAVO_GPU_KERNELS is not a known value.
        InvalidParameterError: it requests Triton, which cannot run here.
    """
    wanted = os.environ.get(_VARIABLE)
    if wanted not in (None, "triton", "torch"):
        raise UnknownOptionError(_VARIABLE, wanted, ["triton", "torch"])
    if dtype not in _DTYPES or device.type not in ("cuda", "cpu"):
        return False
    if device.type == "cpu":
        return wanted == "triton" and _prepare_interpreter()
    return wanted != "torch" and _is_installed()


@cache  # once
def _is_installed() -> bool:
    if find_spec("triton") is None:
        logger.warning("Triton is not installed: computing with torch's ops instead, several times slower")
        return False
    return True


def _prepare_interpreter() -> bool:
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidParameterError(_VARIABLE, "triton", "on a CPU it needs Triton installed, and TRITON_INTERPRET=1")
    from octavo.kernels.triton import interpreter

    interpreter.repair()
    return True
