"""A model for tests with recurrent layers: Qwen3's weights, mixed along a request by a convolution and a recurrence.

Every op is elementwise and exactly rounded, so a token's bits depend on the tokens before it alone, and on their order.

Legend: T = tokens, R = requests, H = query heads, G = kv heads, E = head size.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from octavo.attention.metadata import AttentionMetadata, ForwardBatch
from octavo.config import args, families
from octavo.config.hf import read_model_config
from octavo.config.layers import AttentionSpec, LayerSpec, RecurrentSpec
from octavo.config.model import ModelConfig
from octavo.kernels.states import StateTensors
from octavo.layers.context import BuildContext
from octavo.layers.norm import RMSNorm
from octavo.models.common import DecoderAttention
from octavo.models.interfaces import CausalLM

CONV_WEIGHTS = (0.25, 0.5)  # of the token before the last one, and of the last
DECAY = 0.75
INTERVAL = 8


class ProjectedSpec(RecurrentSpec, frozen=True, kw_only=True):
    """A recurrent layer with the projections of one that attends."""

    projections: AttentionSpec

    @property
    def max_shards(self) -> int:
        return self.projections.num_heads

    @property
    def conv_shape(self) -> tuple[int, ...]:
        return 2, *self.matrix_shape

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        return self.projections.num_kv_heads, self.projections.head_dim

    @property
    def input_size(self) -> int:
        return 2 * self.projections.num_kv_heads * self.projections.head_dim


def _attending(layer: LayerSpec) -> LayerSpec:
    mixer: Any = layer.mixer
    return replace(layer, mixer=mixer.projections) if isinstance(mixer, ProjectedSpec) else layer


class RecurrentMixer(DecoderAttention):
    """With the projections of attention: h = decay * h + k * conv(v), and q * h / (1 + |h|) comes out."""

    is_recordable = False

    def __init__(self, config: ModelConfig, layer: int, context: BuildContext) -> None:
        attending = replace(config, layers=tuple(map(_attending, config.layers)))
        super().__init__(attending, layer, context)
        self._kv_group = config.kv_group_of(layer)
        self._sizes = self.qkv.heads.query.size, self.qkv.heads.kv.size, attending.attention(layer).head_dim

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        states: Any,
        step: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(states, StateTensors)
        qkv, residual = self.qkv.of_normed(norm, x, residual)
        mixed = self._mix(qkv, states, step.batch.of_group(self._kv_group))
        if self.is_last:
            mixed, residual = (self._kernels.kept_rows(rows, step.batch.kept_indices) for rows in (mixed, residual))
        return self.out(mixed), residual

    def _mix(self, qkv: torch.Tensor, states: StateTensors, batch: ForwardBatch) -> torch.Tensor:
        num_heads, num_kv_heads, size = self._sizes
        heads = qkv.view(len(qkv), -1, size)  # [T, H + 2 * G, E]
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        assert batch.state_slots is not None
        if len(qkv) == len(batch.state_slots):  # a token each, all at once: as a graph on a device takes it
            conv, matrix = states.conv[batch.state_slots], states.matrix[batch.state_slots]  # of slot -1: anything
            begins = (batch.state_slots < 0)[:, None, None]
            out, conv, matrix = _recur(
                query, key, value, conv.masked_fill(begins[:, None], 0), matrix.masked_fill(begins, 0)
            )
            states.conv[batch.slot_mapping], states.matrix[batch.slot_mapping] = conv, matrix
            return out.flatten(1)
        outs: dict[int, torch.Tensor] = {}
        starts, targets = batch.query_start_loc_list, batch.slot_mapping.tolist()
        # The last request first: no state may depend on another request of the same step.
        for request, slot in reversed(list(enumerate(batch.state_slots.tolist()))):
            conv = states.conv[slot : slot + 1].clone() if slot >= 0 else torch.zeros_like(states.conv[:1])
            matrix = states.matrix[slot : slot + 1].clone() if slot >= 0 else torch.zeros_like(states.matrix[:1])
            for token in range(starts[request], starts[request + 1]):
                at = slice(token, token + 1)
                outs[token], conv, matrix = _recur(query[at], key[at], value[at], conv, matrix)
                if targets[token] >= 0:
                    states.conv[targets[token]], states.matrix[targets[token]] = conv[0], matrix[0]
        return torch.cat([outs[token] for token in range(len(qkv))]).flatten(1)


def _recur(
    query: torch.Tensor,  # [R, H, E]
    key: torch.Tensor,  # [R, G, E]
    value: torch.Tensor,  # [R, G, E]
    conv: torch.Tensor,  # [R, 2, G, E]
    matrix: torch.Tensor,  # [R, G, E]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute a token of each of R requests; return what comes out, and both parts of the states behind it."""
    mixed = conv[:, 0] * CONV_WEIGHTS[0] + conv[:, 1] * CONV_WEIGHTS[1] + value
    matrix = matrix * DECAY + key * mixed
    answer = (matrix / (1 + matrix.abs())).unsqueeze(2)  # [R, G, 1, E]
    out = query.view(len(query), key.shape[1], -1, key.shape[2]) * answer  # [R, G, H / G, E]
    return out.flatten(1, 2).to(query.dtype), torch.stack((conv[:, 1], value), dim=1), matrix


class RecurrentForCausalLM(CausalLM):
    """Qwen3 with a `RecurrentMixer` in some layers."""

    def build_attention(self, layer: int) -> nn.Module:
        """Compose what mixes the tokens of block number `layer`."""
        if layer in self.config.recurrent_layers:
            return RecurrentMixer(self.config, layer, self.context)
        return super().build_attention(layer)


def with_recurrent_layers(config: ModelConfig, layers: tuple[int, ...]) -> ModelConfig:
    def change(number: int, layer: LayerSpec) -> LayerSpec:
        if number not in layers:
            return layer
        spec = config.attention(number)
        mixer: Any = ProjectedSpec(interval=INTERVAL, projections=spec)  # which crosses no process
        return replace(layer, mixer=mixer)

    return replace(config, layers=tuple(change(number, layer) for number, layer in enumerate(config.layers)))


def use_recurrent_layers(monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...]) -> None:
    """Load checkpoints of Qwen3 as this model from now on."""
    load_as(monkeypatch, RecurrentForCausalLM, lambda config: with_recurrent_layers(config, layers))


def load_as(
    monkeypatch: pytest.MonkeyPatch, model: type[CausalLM], change: Callable[[ModelConfig], ModelConfig]
) -> None:
    """Load any checkpoint as this model from now on, by its own configuration, changed."""

    def read(*arguments: Any, **options: Any) -> ModelConfig:
        return replace(change(read_model_config(*arguments, **options)), architecture=model.__name__)

    monkeypatch.setattr(args, "read_model_config", read)
    qwen3 = families.FAMILIES["Qwen3ForCausalLM"]
    family = replace(qwen3, name=model.__name__, model=f"{model.__module__}:{model.__name__}")
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES, family.name: family})
