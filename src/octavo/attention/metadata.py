"""`ForwardBatch`: one step as tensors. Made by the worker, passed as an argument, dropped after the step.

Legend: T = tokens computed in this step, R = requests in it, B = most blocks any of them holds, L = rows that get
logits, W = tokens that are kept behind the last layer's attention, D = hidden size, A = pairs of elements of a head
that a rotary table turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

RotaryTable = tuple[torch.Tensor, torch.Tensor]  # cos and sin of the step's tokens, [T, A] float32 each


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKVCache:
    """One layer's keys and values. Slot `block_id * block_size + offset` holds one token.

    `KVLayout` gives head size and dtype. A backend may arrange the elements of one block as it likes.
    """

    key: torch.Tensor  # [num_slots, num_kv_heads, head_size]
    value: torch.Tensor  # [num_slots, num_kv_heads, head_size]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """The tokens of request r stand at `query_start_loc[r] : query_start_loc[r + 1]` of every [T] tensor.

    They are the last tokens of its context: positions `seq_lens[r] - query_len` up to `seq_lens[r] - 1`. Keys and
    values of all T tokens are written before any of them is read, so requests of one step may share blocks.
    The `_list` twins are the same numbers on the host, for backends that plan there.

    Of a prompt, only the last token's hidden state is wanted, as a rule. The others go into the last layer to leave
    their keys and values, and no further: behind its attention there are W tokens. At least one, so that no op has to
    do with none; where no token gets logits, its hidden state is for nobody.

    Layers that keep different parts of a context (KV groups) have different block tables. Those of the first group are
    in this batch; `other_groups` are the same batch as the layers of each other group see it.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32, context length including this step's tokens
    slot_mapping: torch.Tensor  # [T] int64, where each token's key and value are written
    block_table: torch.Tensor  # [R, B] int32, padded with 0
    logits_indices: torch.Tensor  # [L] int64, positions in T whose hidden state gets logits
    kept_indices: torch.Tensor | None = None  # [W] int64, ascending: `logits_indices`, or one token. None: all T
    block_size: int
    query_start_loc_list: list[int]  # [R + 1]
    seq_lens_list: list[int]  # [R]
    other_groups: tuple[Self, ...] = ()

    def of_group(self, kv_group: int) -> Self:
        """Return the batch as layers of a KV group see it."""
        return self.other_groups[kv_group - 1] if kv_group else self

    @property
    def groups(self) -> tuple[Self, ...]:
        """The batch as each KV group sees it."""
        return self, *self.other_groups

    def with_tables(self, tables: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Self:
        """Return the batch with slots [T] and block table [R, B] of each further KV group."""
        others = (replace(self, slot_mapping=slots, block_table=table) for slots, table in tables)
        return replace(self, other_groups=tuple(others))

    def shared_by(self, num_groups: int) -> Self:
        """Return the batch for so many KV groups that all have the same block table."""
        return self.with_tables([(self.slot_mapping, self.block_table)] * (num_groups - 1))

    def of_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows that get logits, [L, D], of what the last stage made of the step, [T, D] or [W, D]."""
        if self.kept_indices is None and len(self.logits_indices) < len(hidden):
            return hidden[self.logits_indices]
        return hidden[: len(self.logits_indices)]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """What all layers of one step share; made once per step by the model."""

    batch: ForwardBatch
    plans: tuple[Any, ...]  # of the attention backend, one for each KV group
    rotary: tuple[RotaryTable, ...]  # of which a layer names its own
