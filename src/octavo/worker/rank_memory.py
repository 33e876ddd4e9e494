"""`RankMemory`: one rank's memory, checked before its weights are loaded and reported afterwards, in bytes."""

import logging
from collections.abc import Sequence

import torch

from octavo.config.engine import EngineConfig
from octavo.config.model import ModelConfig
from octavo.config.parallel import Stage
from octavo.device.base import DeviceMemory
from octavo.device.manager import DeviceManager
from octavo.lora.pool import slot_bytes
from octavo.models.interfaces import CausalLM
from octavo.worker.memory import (
    MemoryReport,
    activation_bytes,
    check_length_fits,
    check_weights_fit,
    encoder_bytes,
    gib,
    kv_budget,
)
from octavo.worker.parameters import num_weights, weights_bytes

logger = logging.getLogger(__name__)


class RankMemory:
    """Checks before loading that weights fit, and reports after it what is left. `part` is the rank's shard."""

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

    def check_length_fits(self) -> None:
        """Check `max_model_len` before the model is built.

        Raises:
            InsufficientMemoryError: with both numbers.
        """
        check_length_fits(self._part, self._budget_bytes)

    def check_weights_fit(self, *models: CausalLM) -> None:
        """Check empty models, the rank's own and perhaps a draft model, before their weights are loaded.

        Raises:
            InsufficientMemoryError: with both numbers.
        """
        counts, sizes = (sum(map(measure, models)) for measure in (num_weights, weights_bytes))
        check_weights_fit(self._part, counts, sizes, self._budget_bytes - self.adapter_bytes(models[0]))

    def adapter_bytes(self, model: CausalLM) -> int:
        """The memory of slots for adapters, and of the host cache where it is the same memory.

        Raises:
            UnsupportedModelError: adapters cannot change this model.
        """
        lora = self._config.lora
        if lora is None:
            return 0
        is_host_memory = self._devices.device.type == "cpu"
        return slot_bytes(model, lora.max_lora_rank, experts=lora.experts) * (
            lora.max_loras + lora.max_cpu_loras * is_host_memory
        )

    @property
    def total_bytes(self) -> int:
        """The device's memory, or this rank's share of it."""
        return self._device_memory.total_bytes

    @property
    def estimated_activations(self) -> int:
        """An upper bound on the memory of a step in addition to weights and KV, in bytes."""
        limits = self._config.scheduler
        return activation_bytes(
            self._part, self._stage, limits.max_num_batched_tokens, limits.max_num_seqs, self._dtype_bytes
        )

    @property
    def encoder_bytes(self) -> int:
        """The memory of the vision tower besides its weights; 0 without one."""
        vision = self._part.vision
        if vision is None or not self._stage.is_first:
            return 0
        return encoder_bytes(vision, self._config.scheduler, self._dtype_bytes)

    def report(self, models: Sequence[CausalLM], *, activations: int, graphs: int, scratch: int) -> MemoryReport:
        """Report and log the device's memory with weights loaded and no KV yet.

        `activations`, `graphs` and `scratch`, the KV blocks of padding, are in bytes.
        """
        budget, memory, adapters = self._budget_bytes, self._device_memory, self.adapter_bytes(models[0])
        weights = sum(weights_bytes(model) - model.bytes_in_file for model in models)
        free = memory.free_bytes - sum(model.mapped_bytes for model in models)
        kv_bytes = kv_budget(budget, free, weights, activations + graphs + adapters) - scratch
        report = MemoryReport(
            total_bytes=memory.total_bytes,
            budget_bytes=budget,
            weights_bytes=weights,
            activation_bytes=activations,
            graph_bytes=graphs,
            adapter_bytes=adapters,
            kv_bytes=max(0, kv_bytes),
        )
        logger.info(
            "memory: %s total, %s for Octavo: weights %s, activations %s%s%s, KV up to %s",
            *map(gib, (memory.total_bytes, budget, weights, activations)),
            f", graphs {gib(graphs)}" if graphs else "",
            f", adapters {gib(adapters)}" if adapters else "",
            gib(report.kv_bytes),
        )
        return report

    @property
    def _budget_bytes(self) -> int:
        """This rank's share of the device's memory: as configured, or the device's default."""
        share = self._config.cache.gpu_memory_utilization or self._devices.default_memory_utilization
        return int(self._device_memory.total_bytes * share)

    @property
    def _device_memory(self) -> DeviceMemory:
        """The device's memory, divided equally if all ranks share it."""
        memory, parallel = self._devices.memory(), self._config.parallel
        num_ranks = parallel.world_size * parallel.data_parallel_size if self._devices.ranks_share_memory else 1
        return DeviceMemory(total_bytes=memory.total_bytes // num_ranks, free_bytes=memory.free_bytes // num_ranks)
