"""`DeviceManager`: selects a rank's device and the kernels for it."""

import logging
from functools import partial
from importlib import import_module
from typing import Any

import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.selector import select_attention
from octavo.config.engine import EngineConfig, KVCacheDType
from octavo.config.model import DType, ModelConfig
from octavo.device.base import DeviceKind
from octavo.errors import DeviceUnavailableError, InvalidParameterError, UnknownOptionError
from octavo.kernels.dispatch import has_kernels, select_kernels
from octavo.layers.context import BuildContext
from octavo.layers.quant.registry import resolve_schemes
from octavo.models.interfaces import CausalLM
from octavo.models.weights import process_weights_after_loading

logger = logging.getLogger(__name__)

# In order of preference for "auto".
_KINDS = {
    "cuda": ("octavo.device.gpu", "CudaKind"),
    "xpu": ("octavo.device.gpu", "XpuKind"),
    "mps": ("octavo.device.gpu", "MpsKind"),
    "cpu": ("octavo.device.cpu", "CpuKind"),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DeviceManager:
    """One device of this machine; `index` is the number of this rank among those of its host.

    Raises:
        DeviceUnavailableError: the requested device is not available.
        UnknownOptionError: there is no such kind of device.
        InvalidParameterError: `threads` on a device other than a CPU.
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
                raise InvalidParameterError("threads", threads, f"only for CPUs, and the device is {kind}")
            torch.set_num_threads(threads)
        self.device = torch.device(kind)
        self.kernels = partial(select_kernels, self.device)
        # What its kind says of the device and does with it; see `DeviceKind`.
        self.default_memory_utilization = self._kind.default_memory_utilization
        self.ranks_share_memory = self._kind.ranks_share_memory
        self.memory, self.peak_bytes = self._kind.memory, self._kind.peak_bytes
        self.synchronize, self.queue = self._kind.synchronize, self._kind.queue

    @staticmethod
    def detect_device() -> str:
        """Return the best available kind of device; log which better ones are missing."""
        found = next(name for name in _KINDS if _load_kind(name).is_available())
        missed = list(_KINDS)[: list(_KINDS).index(found)]
        logger.info("device: %s%s", found, f" (no {', '.join(missed)} here)" if missed else "")
        return found

    def resolve_dtype(self, dtype: str, checkpoint_dtype: DType, *, is_quantized: bool = False) -> torch.dtype:
        """Return the dtype of weights and activations; "auto" is the checkpoint's own, or bfloat16 if that `is_slow`.

        Raises InvalidParameterError: an unknown dtype, or one that the device does not support.
        """
        name = checkpoint_dtype if dtype == "auto" else dtype
        if name not in _DTYPES:
            raise InvalidParameterError("dtype", dtype, "one of auto, " + ", ".join(_DTYPES))
        if not self._kind.supports(_DTYPES[name]):
            raise InvalidParameterError("dtype", name, f"this {self.device.type} device cannot compute with it")
        return torch.bfloat16 if dtype == "auto" and self.is_slow(name, is_quantized=is_quantized) else _DTYPES[name]

    def is_slow(self, dtype: str, *, is_quantized: bool = False) -> bool:
        """Return whether this device has kernels for activations in bfloat16, but none for this dtype."""
        has = partial(has_kernels, self.device, is_quantized=is_quantized)
        return self._kind.supports(torch.bfloat16) and has(torch.bfloat16) and not has(_DTYPES[dtype])

    def attention(
        self,
        dtype: torch.dtype,
        name: str = "auto",
        kv_cache_dtype: KVCacheDType = "auto",
        *,
        is_exact: bool = True,
    ) -> AttentionBackend[Any]:
        """Return the attention backend for this dtype, batch-invariant if `is_exact`."""
        return select_attention(self.device, dtype, name, kv_cache_dtype, is_exact=is_exact)

    def build_context(self, model: ModelConfig, quantization: str | None, config: EngineConfig) -> BuildContext:
        """Return what a model's layers are built with: kernels for its weights, or their `quantization`.

        Raises InvalidParameterError: there are no kernels for that and the engine's dtype here.
        """
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        kernels_for = partial(self.kernels, dtype, deterministic=config.deterministic)
        schemes, kernels = resolve_schemes(model.quantization, quantization, kernels_for, self.where(dtype))
        is_exact, kv_dtype = kernels.is_batch_invariant, config.cache.kv_cache_dtype
        attention = self.attention(dtype, kv_cache_dtype=kv_dtype, is_exact=is_exact)
        is_latent = any(spec.latent is not None for spec in model.attending)
        if is_latent and "latent" not in attention.features and not is_exact:
            logger.warning("%s has no latent attention: torch's ops compute it, without graphs", attention.name)
            attention = self.attention(dtype, "sdpa", kv_dtype)
        return BuildContext(kernels=kernels, attention=attention, dtype=dtype, device=self.device, schemes=schemes)

    def where(self, dtype: torch.dtype) -> str:
        """Name device and dtype, for messages."""
        return f"{self.device.type} with {str(dtype).removeprefix('torch.')}"

    def optimize_for_device(self, model: CausalLM) -> None:
        """Pack the model's weights for the kernels, in place. Loaders do this themselves."""
        process_weights_after_loading(model)

    def describe(self) -> dict[str, str]:
        """Return a readable description: the device, its memory, and the kernels for each dtype."""
        memory = self.memory()
        facts = {"device": self.device.type, **self._kind.describe()}
        facts["memory"] = f"{memory.total_bytes / 2**30:.1f} GiB, {memory.free_bytes / 2**30:.1f} GiB free"
        for name, dtype in _DTYPES.items():
            facts[name] = self._describe_dtype(dtype) if self._kind.supports(dtype) else "not supported"
        return facts

    def _describe_dtype(self, dtype: torch.dtype) -> str:
        kernels, attention = self.kernels(dtype), self.attention(dtype)
        is_invariant = kernels.is_batch_invariant and attention.is_batch_invariant
        promise = "batch-invariant" if is_invariant else "not batch-invariant"
        is_recorded = kernels.records_calls and attention.records_calls
        steps = "" if self.device.type != "cpu" else "; steps are recorded" if is_recorded else "; steps run op by op"
        name = str(dtype).removeprefix("torch.")
        auto = f"; slow: dtype=auto computes {name} checkpoints in bfloat16" if self.is_slow(name) else ""
        return f"{kernels.name}, {attention.name}: {promise}{steps}{auto}"


def _load_kind(name: str) -> DeviceKind:
    module, class_name = _KINDS[name]
    kind: DeviceKind = getattr(import_module(module), class_name)()
    return kind
