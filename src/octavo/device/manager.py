"""`DeviceManager`: which device a rank computes on, what it has, and the kernels that fit it."""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.selector import select_attention
from octavo.config.engine import KVCacheDType
from octavo.config.model import DType
from octavo.device.base import DeviceKind, DeviceMemory
from octavo.device.device_queue import DeviceQueue
from octavo.errors import DeviceUnavailableError, InvalidParameterError, UnknownOptionError
from octavo.kernels.dispatch import DENSE_ONLY, Kernels, select_kernels
from octavo.kernels.quantization import WeightFormat
from octavo.models.interfaces import CausalLM
from octavo.models.weights import process_weights_after_loading

logger = logging.getLogger(__name__)

# Best first: the order in which "auto" looks for them.
_KINDS = {
    "cuda": ("octavo.device.cuda", "CudaKind"),
    "xpu": ("octavo.device.xpu", "XpuKind"),
    "mps": ("octavo.device.mps", "MpsKind"),
    "cpu": ("octavo.device.cpu", "CpuKind"),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DeviceManager:
    """One device of this machine, chosen once; `index` is the number of this rank among those of its host.

    Raises:
        DeviceUnavailableError: the device was named, and is not here.
        UnknownOptionError: there is no such kind of device.
        InvalidParameterError: `threads` for a device that has none of ours.
    """

    def __init__(self, device: str = "auto", threads: int | None = None, index: int = 0) -> None:
        kind = self.detect_device() if device == "auto" else device
        if kind not in _KINDS:
            raise UnknownOptionError("device", kind, ["auto", *_KINDS])
        self._kind = _load_kind(kind)
        if not self._kind.is_available():
            here = ", ".join(name for name in _KINDS if _load_kind(name).is_available())
            raise DeviceUnavailableError(f"device={device!r}: this machine, with this build of torch, has only: {here}")
        self._kind.prepare(index)
        if threads is not None:
            if kind != "cpu":
                raise InvalidParameterError("threads", threads, f"nothing: they are a CPU's, and the device is {kind}")
            torch.set_num_threads(threads)
        self.device = torch.device(kind)

    @staticmethod
    def detect_device() -> str:
        """Return the best kind of device that is here, and log what was looked for in vain."""
        found = next(name for name in _KINDS if _load_kind(name).is_available())
        missed = list(_KINDS)[: list(_KINDS).index(found)]
        logger.info("device: %s%s", found, f" (no {', '.join(missed)} here)" if missed else "")
        return found

    @property
    def default_memory_utilization(self) -> float:
        """The share of the device's memory that Octavo takes when nobody says."""
        return self._kind.default_memory_utilization

    @property
    def ranks_share_memory(self) -> bool:
        """Whether several ranks of one host compute in the same memory."""
        return self._kind.ranks_share_memory

    def resolve_dtype(self, dtype: str, checkpoint_dtype: DType) -> torch.dtype:
        """Return the dtype of weights and activations; "auto" is the checkpoint's own.

        Raises:
            InvalidParameterError: no such dtype, or the device cannot compute with it.
        """
        name = checkpoint_dtype if dtype == "auto" else dtype
        if name not in _DTYPES:
            raise InvalidParameterError("dtype", dtype, "one of auto, " + ", ".join(_DTYPES))
        if not self._kind.supports(_DTYPES[name]):
            raise InvalidParameterError("dtype", name, f"this {self.device.type} device cannot compute with it")
        return _DTYPES[name]

    def memory(self) -> DeviceMemory:
        """Read total and free memory, now."""
        return self._kind.memory()

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done."""
        self._kind.synchronize()

    def queue(self) -> DeviceQueue | None:
        """Return a queue of work on the device that the host need not wait for; None where it has to."""
        return self._kind.queue()

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Run something; return the most memory that it held at once. None, and nothing is run, where nobody counts."""
        return self._kind.peak_bytes(run)

    def kernels(
        self,
        dtype: torch.dtype,
        forms: frozenset[WeightFormat | None] = DENSE_ONLY,
        *,
        deterministic: bool = False,
    ) -> Kernels:
        """Return the ops for layers of this dtype, with weights of these forms; see `select_kernels`."""
        return select_kernels(self.device, dtype, forms, deterministic=deterministic)

    def attention(
        self, dtype: torch.dtype, name: str = "auto", kv_cache_dtype: KVCacheDType = "auto"
    ) -> AttentionBackend[Any]:
        """Return the attention backend for this dtype."""
        return select_attention(self.device, dtype, name, kv_cache_dtype)

    def optimize_for_device(self, model: CausalLM) -> None:
        """Pack the model's weights for the unit that reads them, in place. A loader does so itself."""
        process_weights_after_loading(model)

    def describe(self) -> dict[str, str]:
        """Return facts for people, by name: what the device is, its memory, and what each dtype runs on."""
        memory = self.memory()
        facts = {"device": self.device.type, **self._kind.describe()}
        facts["memory"] = f"{memory.total_bytes / 2**30:.1f} GiB, {memory.free_bytes / 2**30:.1f} GiB free"
        for name, dtype in _DTYPES.items():
            facts[name] = self._describe_dtype(dtype) if self._kind.supports(dtype) else "not supported"
        return facts

    def _describe_dtype(self, dtype: torch.dtype) -> str:
        kernels, attention = self.kernels(dtype), self.attention(dtype)
        is_invariant = kernels.is_row_invariant and attention.is_row_invariant
        promise = "the same bits in any batch" if is_invariant else "the last bits may depend on the batch"
        return f"{kernels.name}, {attention.name}: {promise}"


def _load_kind(name: str) -> DeviceKind:
    module, class_name = _KINDS[name]
    kind: DeviceKind = getattr(import_module(module), class_name)()
    return kind
