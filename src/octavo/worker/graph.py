"""The CPU's captured graph: all layers of a step as one native call. Recorded once, replayed for every step.

Legend: T = tokens of the step, D = hidden size.
"""

import logging
from collections.abc import Sequence
from typing import Self

import torch

from octavo.attention.metadata import ForwardBatch, LayerCache
from octavo.attention.native import NativeAttention, NativePlan
from octavo.contracts.kv_cache import KVGroup
from octavo.kernels.native import NativeKernels
from octavo.kernels.tape import Tape
from octavo.layers.attention import AttentionMetadata
from octavo.models.interfaces import CausalLM, IntermediateTensors
from octavo.worker.recording import refuse_torch_ops

logger = logging.getLogger(__name__)


class StepGraph:
    """Does what `model.run_stage` does, for up to `max_tokens` tokens, with the same bits."""

    def __init__(
        self,
        model: CausalLM,
        tape: Tape,
        x: torch.Tensor,  # [max_tokens, D] what the first call reads
        residual: torch.Tensor | None,  # [max_tokens, D] the stream from the stage before
        result: IntermediateTensors,  # [max_tokens, D] each, what the last call writes
    ) -> None:
        self._model, self._tape = model, tape
        self._x, self._residual, self._result = x, residual, result
        self._attention = model.context.attention
        self._group_size = model.heads.group_size

    @classmethod
    def capture(cls, model: CausalLM, kv_caches: Sequence[LayerCache], block_size: int, max_tokens: int) -> Self | None:
        """Record the layers; None, said in the log, where they cannot be. Nothing is computed or written.

        Raises:
            RecordingError: a layer does something that a recording would miss.
        """
        if (obstacle := model.recording_obstacle) is not None:
            logger.info("steps run op by op: %s", obstacle)
            return None
        kernels, attention = model.context.kernels, model.context.attention
        assert isinstance(kernels, NativeKernels), "no others record"
        assert isinstance(attention, NativeAttention), "no other is recorded"
        x = torch.empty(max_tokens, model.config.hidden_size, dtype=model.context.dtype)
        residual = None if model.stage.is_first else torch.empty_like(x)
        with torch.inference_mode(), refuse_torch_ops(model), kernels.recording() as tape:
            step = _blank_step(attention, block_size, model.config.kv_groups)
            result = model.run_layers(x, residual, kv_caches, step)
        return cls(model, tape, x, residual, result)

    def run(self, batch: ForwardBatch, incoming: IntermediateTensors | None) -> IntermediateTensors:
        """Return what the stage makes of the step; the next run overwrites it."""
        num_tokens = len(batch.input_ids)
        if incoming is None:
            self._x[:num_tokens] = self._model.embed(batch)
        else:
            assert self._residual is not None, "the first stage gets nothing"
            self._x[:num_tokens], self._residual[:num_tokens] = incoming.hidden, incoming.residual
        step = self._model.attention_step(batch)
        assert isinstance(self._attention, NativeAttention)
        make_step = self._attention.make_step
        self._tape.replay(num_tokens, [make_step(plan, step.cos, step.sin, self._group_size) for plan in step.plans])
        num_rows = num_tokens
        if self._model.stage.is_last and batch.kept_indices is not None:
            num_rows = len(batch.kept_indices)
        return IntermediateTensors(self._result.hidden[:num_rows], self._result.residual[:num_rows])


def _blank_step(attention: NativeAttention, block_size: int, groups: tuple[KVGroup, ...]) -> AttentionMetadata:
    """Return a step of no tokens, for the recording: each replay brings its own."""
    nothing = torch.empty(0, dtype=torch.int64)
    batch = ForwardBatch(
        input_ids=nothing,
        positions=nothing,
        query_start_loc=nothing,
        seq_lens=nothing,
        slot_mapping=nothing,
        block_table=nothing.view(0, 0),
        logits_indices=nothing,
        block_size=block_size,
        query_start_loc_list=[0],
        seq_lens_list=[],
    ).shared_by(groups)
    plan = NativePlan(batch)
    plan.step = attention.make_step(plan, nothing.float(), nothing.float(), 1)
    return AttentionMetadata(batch=batch, plans=(plan,) * len(groups), cos=nothing.float(), sin=nothing.float())
