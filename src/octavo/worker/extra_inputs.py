"""Inputs of requests in addition to tokens, as tensors of a step: adapters, rotary positions, embeddings, images.

Legend: T = tokens of the step, R = requests in it, P = tokens of a prompt, D = hidden size.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from octavo.attention.metadata import InputEmbeds
from octavo.contracts.engine import ExtraInputs, VisionInput
from octavo.contracts.schedule import NO_SLOT, Int32Array, SchedulerOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowInputs:
    """The extra inputs of one row."""

    adapter_slot: int
    rotary: Int32Array | None  # [3, P]
    shift: int  # of positions past the prompt, so that they follow the largest
    spans: list[tuple[int, torch.Tensor]]  # first position, and embeddings [., outputs * D] float32
    vision: list[VisionInput]
    whole_spans: list[tuple[int, int]]  # [start, end)

    def touches_whole_span(self, positions: NDArray[Any]) -> bool:
        """Return whether any of consecutive `positions` [.] is in a whole span."""
        return any(start <= positions[-1] and positions[0] < end for start, end in self.whole_spans)

    def visible_ends(self, positions: NDArray[Any]) -> NDArray[Any]:
        """Return `ForwardBatch.visible_ends` of consecutive `positions` [.]."""
        ends = positions + 1
        for start, end in self.whole_spans:
            ends[(positions >= start) & (positions < end)] = end
        return ends

    def rotary_positions(self, positions: NDArray[Any]) -> NDArray[Any]:
        """Return rotary positions [3, .] of consecutive `positions` [.]; past the prompt, they follow the largest."""
        if self.rotary is None:
            return np.broadcast_to(positions, (3, len(positions)))
        num_prompt = self.rotary.shape[1]
        behind = positions[positions >= num_prompt] + self.shift
        of_prompt = self.rotary[:, positions[: len(positions) - len(behind)]]
        return np.concatenate((of_prompt, np.broadcast_to(behind, (3, len(behind)))), axis=1)


class ExtraRows:
    """Extra inputs by row, for rows that have any. `send` copies arrays to the device.

    `encoded` has the embeddings of images by content hash, for models that take images; see `attach_encoder`.
    """

    def __init__(self, send: Callable[..., list[torch.Tensor]]) -> None:
        self._rows: dict[int, _RowInputs] = {}
        self._send = send
        self.encoded: Mapping[str, torch.Tensor] | None = None
        self._num_outputs = 1

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, extra: ExtraInputs, adapter_slot: int) -> None:
        """Store a request's extra inputs and the slot of its adapter."""
        rotary, shift, spans = None, 0, []
        if extra.rotary_positions is not None:
            rotary = np.frombuffer(extra.rotary_positions, dtype=np.int32).reshape(3, -1)
            shift = int(rotary.max()) + 1 - rotary.shape[1]
        for span in extra.embedding_spans:
            [embeds] = self._send(np.frombuffer(span.embeddings, dtype=np.float32).copy())
            embeds = embeds.view(span.num_tokens, -1)  # nothing to add in layers
            spans.append((span.start, pad(embeds, (0, (self._num_outputs - 1) * embeds.shape[1]))))
        self._rows[row] = _RowInputs(
            adapter_slot=adapter_slot,
            rotary=rotary,
            shift=shift,
            spans=spans,
            vision=extra.vision,
            whole_spans=extra.whole_spans,
        )

    def attach_encoder(self, encoded: Mapping[str, torch.Tensor], num_outputs: int) -> None:
        """Take images' embeddings [tokens, num_outputs * D] from `encoded`, by content hash."""
        self.encoded, self._num_outputs = encoded, num_outputs

    def remove(self, row: int) -> None:
        """Drop a row's extra inputs, if any."""
        self._rows.pop(row, None)

    def concern_decoding(self, rows: Int32Array) -> bool:
        """Return whether a pure decode step of `rows` [R] depends on any of their extra inputs."""
        found = [self._rows[row] for row in rows.tolist() if row in self._rows]
        return any(each.adapter_slot != NO_SLOT or each.rotary is not None for each in found)

    def of_step(self, scheduler_output: SchedulerOutput, starts: Int32Array, positions: NDArray[Any]) -> dict[str, Any]:
        """Return the fields of `ForwardBatch` that the step needs.

        The tokens of request r start at `starts[r]` [R + 1]; `positions` [T] are positions in their contexts.
        """
        parts = [
            (self._rows[row], slice(starts[at], starts[at + 1]))
            for at, row in enumerate(scheduler_output.rows.tolist())
            if row in self._rows
        ]
        fields: dict[str, Any] = {}
        if any(of.adapter_slot != NO_SLOT for of, _ in parts):
            adapter_ids = np.full(len(positions), NO_SLOT, dtype=np.int64)
            for of, tokens in parts:
                adapter_ids[tokens] = of.adapter_slot
            [fields["adapter_ids"]] = self._send(adapter_ids)
        if any(of.rotary is not None for of, _ in parts):
            rotary = np.tile(positions.astype(np.int64), (3, 1))
            for of, tokens in parts:
                rotary[:, tokens] = of.rotary_positions(positions[tokens])
            fields["mrope_positions"] = self._send(rotary.ravel())[0].view(3, -1)
        if any(of.touches_whole_span(positions[tokens]) for of, tokens in parts):
            ends = positions.astype(np.int32) + 1
            for of, tokens in parts:
                ends[tokens] = of.visible_ends(positions[tokens])
            [fields["visible_ends"]] = self._send(ends)
        if replaced := [piece for of, tokens in parts for piece in self._pieces(of, tokens.start, positions[tokens])]:
            [indices] = self._send(np.concatenate([at for at, _ in replaced]))
            fields["inputs_embeds"] = InputEmbeds(
                indices=indices, values=torch.cat([rows for _, rows in replaced]), num_outputs=self._num_outputs
            )
        return fields

    def _pieces(
        self, of: _RowInputs, first_token: int, positions: NDArray[Any]
    ) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
        """Yield token indices [.] and their embeddings [., outputs * D]; a row has `positions`, from `first_token`."""
        first, end = int(positions[0]), int(positions[-1]) + 1
        spans = list(of.spans)
        if self.encoded is not None:  # only of images in this chunk: those of others may be gone
            touched = (each for each in of.vision if each.start < end and first < each.start + each.num_tokens)
            spans += [(each.start, self.encoded[each.content_hash]) for each in touched]
        for start, embeds in spans:
            low, high = max(first, start), min(end, start + len(embeds))
            if low < high:
                yield np.arange(low, high) - first + first_token, embeds[low - start : high - start]
