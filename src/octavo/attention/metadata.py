"""`ForwardBatch`: one step as tensors. Made by the worker, passed as an argument, dropped after the step.

Legend: T = tokens computed in this step, R = requests in it, B = most blocks any of them holds, L = rows that get
logits, E = tokens whose embedding is replaced, W = tokens that are kept after the last layer's attention, D = hidden
size, A = pairs of elements of a head that a rotary table turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch

from octavo.contracts.kv_cache import KVGroup

RotaryTable = tuple[torch.Tensor, torch.Tensor]  # cos and sin of the step's tokens, [T, A] float32 each


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """One layer's keys and values. Slot `block_id * block_size + offset` holds one token.

    `KVLayout` gives head size and dtype. A backend may arrange the elements of one block as it likes. A latent layer
    has one kv head, whose values are a view of its keys.
    """

    key: torch.Tensor  # [num_slots, num_kv_heads, head_size]
    value: torch.Tensor  # [num_slots, num_kv_heads, head_size]

    @property
    def pools(self) -> tuple[torch.Tensor, ...]:
        """The memory, each part once."""
        return (self.key,) if self.value.data_ptr() == self.key.data_ptr() else (self.key, self.value)


@dataclass(frozen=True, slots=True)
class RecurrentStates:
    """One recurrent layer's states, a block each. A state has one part for a convolution, one for the recurrence."""

    conv: torch.Tensor  # [num_blocks, *conv_shape]
    matrix: torch.Tensor  # [num_blocks, *matrix_shape] float32


LayerCache = LayerKVCache | RecurrentStates


class GroupSlots(NamedTuple):
    """What differs between the KV groups of a step: the fields of `ForwardBatch` with these names."""

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    state_slots: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InputEmbeds:
    """Embeddings that replace those of E tokens."""

    indices: torch.Tensor  # [E] int64, in T
    values: torch.Tensor  # [E, D] float32

    def put_into(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of x [T, D] with the tokens' rows replaced."""
        return x.index_copy(0, self.indices, self.values.to(x.dtype))


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
    in this batch; `other_groups` are the same batch as the layers of each other group see it. A recurrent layer reads
    the state at `state_slots` before a request's first token, and stores the state behind each token that has a slot.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32, context length including this step's tokens
    slot_mapping: torch.Tensor  # [T] int64, where each token's key and value are written, or its state (-1: nowhere)
    block_table: torch.Tensor  # [R, B] int32, padded with 0
    logits_indices: torch.Tensor  # [L] int64, positions in T whose hidden state gets logits
    kept_indices: torch.Tensor | None = None  # [W] int64, ascending: `logits_indices`, or one token. None: all T
    block_size: int
    query_start_loc_list: list[int]  # [R + 1]
    seq_lens_list: list[int]  # [R]
    rows: torch.Tensor | None = None  # [R] int64, where each request is while it runs; None: no requests run
    adapter_ids: torch.Tensor | None = None  # [T] int64, -1 without one; None: no token has one
    mrope_positions: torch.Tensor | None = None  # [3, T] int64, in time, height and width; None: all are `positions`
    inputs_embeds: InputEmbeds | None = None
    state_slots: torch.Tensor | None = None  # [R] int64, -1: no token is before. None: no recurrent group
    other_groups: tuple[Self, ...] = ()

    def of_group(self, kv_group: int) -> Self:
        """Return the batch as layers of a KV group see it."""
        return self.other_groups[kv_group - 1] if kv_group else self

    @property
    def rotary_positions(self) -> torch.Tensor:
        """What rotary embeddings turn by: [T], or [3, T]."""
        return self.positions if self.mrope_positions is None else self.mrope_positions

    @property
    def groups(self) -> tuple[Self, ...]:
        """The batch as each KV group sees it."""
        return self, *self.other_groups

    def with_groups(self, groups: Sequence[GroupSlots]) -> Self:
        """Return the batch as several KV groups see it."""
        first, *others = (replace(self, **slots._asdict()) for slots in groups)
        return replace(first, other_groups=tuple(others)) if others else first

    def shared_by(self, groups: Sequence[KVGroup]) -> Self:
        """Return the batch for groups that have the same block table; recurrent ones begin anew and store nothing."""
        nowhere = torch.full_like(self.slot_mapping, -1)
        begins = GroupSlots(nowhere, self.block_table, nowhere.new_full((len(self.seq_lens),), -1))
        same = GroupSlots(self.slot_mapping, self.block_table)
        return self.with_groups([begins if group.kind == "recurrent" else same for group in groups])

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
