"""What a rank takes of its device's memory, and what that leaves for KV blocks. The arithmetic is in `memory`."""

import logging

import torch

from octavo.config.engine import EngineConfig
from octavo.config.model import ModelConfig
from octavo.config.parallel import Stage
from octavo.contracts.kv_cache import MemoryReport
from octavo.device.base import DeviceMemory
from octavo.device.manager import DeviceManager
from octavo.models.interfaces import CausalLM
from octavo.worker.memory import activation_bytes, check_weights_fit, gib, kv_budget
from octavo.worker.parameters import num_weights, weights_bytes

logger = logging.getLogger(__name__)


class RankMemory:
    """Asked in front of loading whether the weights fit, and behind it what is left. `part` is what the rank holds."""

    def __init__(
        self,
        config: EngineConfig,
        devices: DeviceManager,
        part: ModelConfig,
        stage: Stage,
        dtype: torch.dtype,
    ) -> None:
        self._config, self._devices = config, devices
        self._part, self._stage = part, stage
        self._dtype_bytes = dtype.itemsize

    def check_weights_fit(self, model: CausalLM) -> None:
        """Refuse an empty model before its weights are loaded.

        Raises:
            InsufficientMemoryError: with both numbers.
        """
        check_weights_fit(self._part, num_weights(model), weights_bytes(model), self._budget_bytes)

    @property
    def total_bytes(self) -> int:
        """The device's memory, or this rank's part of it."""
        return self._device_memory.total_bytes

    @property
    def estimated_activations(self) -> int:
        """An upper estimate of what a step takes beside weights and KV, in bytes."""
        limits = self._config.scheduler
        return activation_bytes(
            self._part, self._stage, limits.max_num_batched_tokens, limits.max_num_seqs, self._dtype_bytes
        )

    def report(self, model: CausalLM, *, activations: int, graphs: int, scratch: int) -> MemoryReport:
        """Report, and log, the device's memory with the weights loaded and no KV yet.

        In bytes: what a step takes, what graphs take, and KV blocks that only padding uses.
        """
        budget, memory = self._budget_bytes, self._device_memory
        weights = weights_bytes(model) - model.bytes_in_file
        free = memory.free_bytes - model.mapped_bytes
        kv_bytes = kv_budget(budget, free, weights, activations + graphs) - scratch
        report = MemoryReport(
            total_bytes=memory.total_bytes,
            budget_bytes=budget,
            weights_bytes=weights,
            activation_bytes=activations,
            graph_bytes=graphs,
            kv_bytes=max(0, kv_bytes),
        )
        logger.info(
            "memory: %s in all, %s for Octavo: weights %s, activations %s%s, KV up to %s",
            *map(gib, (memory.total_bytes, budget, weights, activations)),
            f", graphs {gib(graphs)}" if graphs else "",
            gib(report.kv_bytes),
        )
        return report

    @property
    def _budget_bytes(self) -> int:
        """What this rank may use of the device: the share asked for, or the device's own default."""
        share = self._config.cache.gpu_memory_utilization or self._devices.default_memory_utilization
        return int(self._device_memory.total_bytes * share)

    @property
    def _device_memory(self) -> DeviceMemory:
        """The device's memory; of one that all ranks compute in, an equal part."""
        memory, parallel = self._devices.memory(), self._config.parallel
        num_ranks = parallel.world_size * parallel.data_parallel_size if self._devices.ranks_share_memory else 1
        return DeviceMemory(total_bytes=memory.total_bytes // num_ranks, free_bytes=memory.free_bytes // num_ranks)
