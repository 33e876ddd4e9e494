"""The C++ sampler backend: the same tokens as the reference, without its intermediates.

Legend: S = rows, V = vocabulary size.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.schedule import Int32Array
from octavo.kernels.dispatch import native_kernels
from octavo.kernels.native import DRAW_ROW, NativeKernels
from octavo.kernels.reference import Kernels
from octavo.sampling.backend import SampledTokens, SamplerBackend, TorchSamplerBackend


def select_sampler_backend(device: torch.device, kernels: Kernels) -> SamplerBackend:
    """Return the fastest sampler backend for logits on `device`. A native one shares the model's threads."""
    native = kernels if isinstance(kernels, NativeKernels) else native_kernels()
    return TorchSamplerBackend() if device.type != "cpu" or native is None else NativeSamplerBackend(native)


class NativeSamplerBackend:
    """See `SamplerBackend`. Rows that the kernels are not sure of, about one in 10^8, are sampled again by the
    reference.
    """

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self._definition = TorchSamplerBackend()

    def draw(self, logits: Tensor, records: NDArray[np.void], output_indices: Int32Array) -> SampledTokens:
        token_ids, max_logit = self._kernels.draw(logits, draw_rows(records, output_indices))
        if len(unsure := (token_ids.numpy() < 0).nonzero()[0]):
            again = self._definition.draw(logits[unsure], records[unsure], output_indices[unsure])
            token_ids[unsure] = again.token_ids
        return SampledTokens(token_ids=token_ids, max_logit=max_logit)


def draw_rows(records: NDArray[np.void], output_indices: Int32Array) -> NDArray[np.void]:
    """Convert the sampling metadata of S rows to the kernels' layout."""
    wanted = np.zeros(len(records), dtype=DRAW_ROW)
    for name in ("temperature", "top_p", "top_k", "seed_low", "seed_high"):
        wanted[name] = records[name]
    wanted["output_index"] = output_indices
    # torch's log, so that the bits min-p compares with are those of the reference.
    wanted["log_min_p"] = torch.from_numpy(records["min_p"].copy()).log().numpy()
    return wanted
