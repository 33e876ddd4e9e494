"""`ForwardBatch`: one step as tensors. Built by the worker, passed as an argument, dropped after the step.

Legend: T = tokens computed in this step, R = requests in it, B = most blocks any of them holds, L = rows that get
logits, E = tokens whose embedding is replaced, W = tokens that are kept after the last layer's attention, D = hidden
size, A = pairs of elements of a head that a rotary table rotates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from octavo.contracts.kv_cache import KVGroup
from octavo.kernels.reference import Kernels
from octavo.kernels.states import StateStep, StateTensors

RotaryTable = tuple[Tensor, Tensor]  # cos and sin of the step's tokens, [T, A] float32 each


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """One layer's keys and values. Slot `block_id * block_size + offset` holds one token.

    `KVLayout` gives head size and dtype. The order of elements within a block is up to the backend. A latent layer has
    one kv head, whose values are a view of its keys.
    """

    key: Tensor  # [num_slots, num_kv_heads, head_size]
    value: Tensor  # [num_slots, num_kv_heads, head_size]

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """The distinct tensors: one, if values are a view of keys."""
        return (self.key,) if self.value.data_ptr() == self.key.data_ptr() else (self.key, self.value)


LayerCache = LayerKVCache | StateTensors


class GroupSlots(NamedTuple):
    """The fields of `ForwardBatch` that differ between the KV groups of a step."""

    slot_mapping: Tensor
    block_table: Tensor
    state_slots: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InputEmbeds:
    """Embeddings that replace the token embeddings of E tokens; and what first layers add to their output, if any."""

    indices: Tensor  # [E] int64, in T
    values: Tensor  # [E, outputs * D]: the embeddings, then what each of the first layers adds
    num_outputs: int = 1

    def put_into(self, x: Tensor) -> Tensor:
        """Return a copy of x [T, D] with the tokens' rows replaced."""
        return x.index_copy(0, self.indices, self.values[:, : x.shape[1]].to(x.dtype))

    def add_after(self, layer: int, x: Tensor) -> Tensor:
        """Return a copy of a layer's output x [T, D] with its additions for the tokens' rows."""
        added = self.values.chunk(self.num_outputs, dim=1)[1 + layer]
        return x.index_add(0, self.indices, added.to(x.dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """The tokens of request r are at `query_start_loc[r] : query_start_loc[r + 1]` of every [T] tensor.

    They are the last tokens of its context: positions `seq_lens[r] - query_len` up to `seq_lens[r] - 1`. Keys and
    values of all T tokens are written before any of them is read, so requests of one step may share blocks.
    The `_list` twins are the same numbers on the host, for backends that plan there.

    Of a prompt, usually only the last token's hidden state is needed. The others enter the last layer just to write
    their keys and values: after its attention, W tokens are left. At least one, so that ops need not handle empty
    tensors; if no token gets logits, its hidden state is unused.

    A token sees positions up to its own, or to the end of a span whose tokens attend to each other, such as an image; a
    step never ends inside such a span.

    Layers that keep different parts of a context (KV groups) have different block tables. This batch has those of the
    first group; `other_groups` has the same batch for the layers of each other group. A recurrent layer reads the state
    at `state_slots` before a request's first token, and stores the state after each token that has a slot.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start_loc: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32, context length including this step's tokens
    slot_mapping: Tensor  # [T] int64, where each token's key and value are written, or its state (-1: nowhere)
    block_table: Tensor  # [R, B] int32, padded with 0
    logits_indices: Tensor  # [L] int64, positions in T whose hidden state gets logits
    kept_indices: Tensor | None = None  # [W] int64, ascending: `logits_indices`, or one token. None: all T
    block_size: int
    query_start_loc_list: list[int]  # [R + 1]
    seq_lens_list: list[int]  # [R]
    rows: Tensor | None = None  # [R] int64, each request's stable row; None: there are no requests
    adapter_ids: Tensor | None = None  # [T] int64, -1: no adapter; None: no token has one
    # [3, T] int64, in time, height and width, or [T] int64, rows of a table that are not positions; None: `positions`
    other_positions: Tensor | None = None
    inputs_embeds: InputEmbeds | None = None
    token_types: Tensor | None = None  # [T] int64, of encoders: 1 in the second text of a pair; None: all are 0
    visible_ends: Tensor | None = None  # [T] int32, one past the last position each token sees; None: its own
    state_slots: Tensor | None = None  # [R] int64, -1: no tokens before. None: no recurrent group
    num_replayed: Tensor | None = None  # [R] int32, see `StateStep`. None: no request has drafts, nor had any
    num_drafts: Tensor | None = None  # [R] int32
    other_groups: tuple[Self, ...] = ()

    @classmethod
    def of_sequences(
        cls,
        inputs: Sequence[list[int]],
        starts: Sequence[int],
        block_ids: Sequence[list[int]],
        block_size: int,
        groups: Sequence[KVGroup],
        device: torch.device | str = "cpu",
    ) -> Self:
        """Return a step of R sequences, each with its token ids from a position on, and its blocks in every KV group.

        All tokens get logits.
        """
        positions = [torch.arange(start, start + len(ids)) for ids, start in zip(inputs, starts, strict=True)]
        width, lens = max(map(len, block_ids)), list(map(len, inputs))
        table = torch.tensor([ids + [0] * (width - len(ids)) for ids in block_ids], dtype=torch.int32)
        slots = [
            row[at // block_size].long() * block_size + at % block_size
            for row, at in zip(table, positions, strict=True)
        ]
        query_start_loc = [0, *accumulate(lens)]
        seq_lens = [start + length for start, length in zip(starts, lens, strict=True)]
        batch = cls(
            input_ids=torch.tensor([token_id for ids in inputs for token_id in ids], device=device),
            positions=torch.cat(positions).to(device),
            query_start_loc=torch.tensor(query_start_loc, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            slot_mapping=torch.cat(slots).to(device),
            block_table=table.to(device),
            logits_indices=torch.arange(query_start_loc[-1], device=device),
            block_size=block_size,
            query_start_loc_list=query_start_loc,
            seq_lens_list=seq_lens,
        )
        return batch.shared_by(groups) if groups else batch

    @property
    def kept_adapter_ids(self) -> Tensor | None:
        """The adapters of tokens that are kept after the last layer's attention, [W] or [T]."""
        if self.adapter_ids is None or self.kept_indices is None:
            return self.adapter_ids
        return self.adapter_ids[self.kept_indices]

    @property
    def has_inputs_inside(self) -> bool:
        """Whether layers read more of it than x and adapters: what towers add between layers."""
        return self.inputs_embeds is not None and self.inputs_embeds.num_outputs > 1

    def of_group(self, kv_group: int) -> Self:
        """Return the batch for the layers of a KV group."""
        return self.other_groups[kv_group - 1] if kv_group else self

    def state_step(self, kv_group: int) -> StateStep:
        """Return the step as the layers of a recurrent KV group see it."""
        seen = self.of_group(kv_group)
        assert seen.state_slots is not None, "the layers of this group keep no state"
        return StateStep(
            kv_group=kv_group,
            query_start_loc=self.query_start_loc,
            query_start_loc_list=self.query_start_loc_list,
            slots=seen.slot_mapping,
            begins=seen.state_slots,
            num_replayed=self.num_replayed,
            num_drafts=self.num_drafts,
            rows=None if self.num_drafts is None else self.rows,
        )

    @property
    def rotary_positions(self) -> Tensor:
        """The positions for rotary embeddings: [T], or [3, T]."""
        return self.positions if self.other_positions is None else self.other_positions

    @property
    def groups(self) -> tuple[Self, ...]:
        """The batch for each KV group."""
        return self, *self.other_groups

    def with_groups(self, groups: Sequence[GroupSlots]) -> Self:
        """Return the batch for several KV groups."""
        first, *others = (replace(self, **slots._asdict()) for slots in groups)
        return replace(first, other_groups=tuple(others)) if others else first

    def shared_by(self, groups: Sequence[KVGroup]) -> Self:
        """Return the batch for groups that share a block table; recurrent ones start from scratch and store nothing."""
        nowhere = torch.full_like(self.slot_mapping, -1)
        begins = GroupSlots(nowhere, self.block_table, nowhere.new_full((len(self.seq_lens),), -1))
        same = GroupSlots(self.slot_mapping, self.block_table)
        return self.with_groups([begins if group.kind == "recurrent" else same for group in groups])

    def of_logits(self, hidden: Tensor) -> Tensor:
        """Return the rows [L, D] that get logits, out of the last stage's hidden states [T, D] or [W, D]."""
        if self.kept_indices is None and len(self.logits_indices) < len(hidden):
            return hidden[self.logits_indices]
        return hidden[: len(self.logits_indices)]

    def head_inputs(self, hidden: Tensor, tokens: slice | None = None) -> tuple[Tensor, Tensor | None]:
        """Return hidden states and adapters, for the logits head: of the rows that get logits, or of some of T."""
        ids = self.adapter_ids
        if tokens is None:
            return self.of_logits(hidden), None if ids is None else ids[self.logits_indices]
        return hidden[tokens], None if ids is None else ids[tokens]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """Data shared by all layers of one step; built once per step by the model."""

    batch: ForwardBatch
    plans: tuple[Any, ...]  # of the attention backend, one per KV group
    rotary: tuple[RotaryTable, ...]  # indexed by `AttentionLayer.rotary`
    adapter_ids: Tensor | None = None  # [T] int64, see `ForwardBatch`
    kept_adapter_ids: Tensor | None = None  # [W] int64, of tokens kept after the last layer's attention

    def adapter_ids_after(self, *, is_last: bool) -> Tensor | None:
        """Return the adapters of the tokens that are left after a layer's attention."""
        return self.kept_adapter_ids if is_last else self.adapter_ids

    def rows_after(self, kernels: Kernels, *rows: Tensor, is_last: bool) -> tuple[Tensor, ...]:
        """Return of each of `rows` [T, D] those of the tokens that are left after a layer's attention: [W, D]."""
        return tuple(kernels.kept_rows(each, self.batch.kept_indices) for each in rows) if is_last else rows
