"""What a model keeps per request in addition to KV, and what its layers read of it in a step.

A runner sees `ModelStates`; another kind of state is one more class in its list.

Legend: T = tokens of the step, R = requests in it, P = tokens of a prompt or patches of images, C = values of a patch,
D = hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from octavo.attention.metadata import InputEmbeds
from octavo.config.engine import EngineConfig
from octavo.contracts.engine import VisionInput
from octavo.contracts.schedule import NO_SLOT, Int32Array, SchedulerOutput
from octavo.errors import InvalidParameterError
from octavo.lora.pool import AdapterPool
from octavo.models.interfaces import CausalLM
from octavo.worker.graph import torch_threads

Send = Callable[..., list[torch.Tensor]]  # copies arrays to the device


class RowTokens(NamedTuple):
    """The tokens that one row computes in a step."""

    row: int
    tokens: slice  # in T
    positions: NDArray[Any]  # [.] in its context, consecutive


class ModelState(ABC):
    """One kind of state. `by_row` holds it, for rows that have any."""

    is_read_by_decoding: ClassVar[bool] = True  # a pure decode step depends on it

    def __init__(self, send: Send) -> None:
        self.by_row: dict[int, Any] = {}
        self._send = send

    @abstractmethod
    def prepare(self, step: SchedulerOutput) -> None:
        """Do what the step says, and take in its new requests.

        Raises InvalidParameterError: a request has an input that the model does not read.
        """

    @abstractmethod
    def inputs(self, step: SchedulerOutput, parts: list[RowTokens], positions: NDArray[Any]) -> dict[str, Any]:
        """Return fields of `ForwardBatch` for rows that have state; `positions` [T] are those of all tokens."""


class ModelStates:
    """All states of a model on one stage. Costs nothing in steps where no row has any."""

    def __init__(self, states: tuple[ModelState, ...]) -> None:
        self._states = states

    @classmethod
    def of_model(
        cls, model: CausalLM, config: EngineConfig, send: Send, free_bytes: Callable[[], int]
    ) -> "ModelStates":
        """Adapters come first: the scheduler takes fills as done even if the rest of the step fails.

        `free_bytes` measures the device's memory.
        """
        pool = None if config.lora is None else AdapterPool(model, config.lora, config.load, free_bytes)
        states: list[ModelState] = [
            AdapterSlots(pool, send),
            RotaryOffsets(model, send),
            ShortAngles(model, send),
            ReplacedEmbeddings(model, send),
            TextKinds(send),
        ]
        if config.speculative is not None and model.config.recurrent_layers:
            states.append(LoggedDrafts(send, config.speculative.num_speculative_tokens))
        return cls(tuple(states))

    @property
    def adapters(self) -> AdapterPool:
        """Those of the rank; there are some with `enable_lora` only."""
        [pool] = [state.pool for state in self._states if isinstance(state, AdapterSlots)]
        assert pool is not None, "adapters are served with enable_lora only"
        return pool

    def prepare(self, step: SchedulerOutput) -> None:
        """See `ModelState.prepare`. Clears the rows of new requests first: an earlier step may have failed midway."""
        for request in step.scheduled_new_reqs:
            self.forget(request.row)
        for state in self._states:
            state.prepare(step)

    def inputs(self, step: SchedulerOutput, starts: Int32Array, positions: NDArray[Any]) -> dict[str, Any]:
        """Return the fields of `ForwardBatch` that the step needs.

        The tokens of request r start at `starts[r]` [R + 1]; `positions` [T] are positions in their contexts.
        """
        fields: dict[str, Any] = {}
        for state in self._states:
            if not state.by_row:
                continue
            parts = [
                RowTokens(row, slice(starts[at], starts[at + 1]), positions[starts[at] : starts[at + 1]])
                for at, row in enumerate(step.rows.tolist())
                if row in state.by_row
            ]
            if parts:
                fields |= state.inputs(step, parts, positions)
        return fields

    def forget(self, row: int) -> None:
        """Drop all that a row has."""
        for state in self._states:
            state.by_row.pop(row, None)

    def are_read_by_decoding(self, rows: Int32Array) -> bool:
        """Return whether a pure decode step of `rows` [R] depends on any of them."""
        found = [state.by_row for state in self._states if state.by_row and state.is_read_by_decoding]
        return any(row in by_row for by_row in found for row in rows.tolist())


class AdapterSlots(ModelState):
    """The slot of each row's adapter."""

    def __init__(self, pool: AdapterPool | None, send: Send) -> None:
        super().__init__(send)
        self.pool = pool

    def prepare(self, step: SchedulerOutput) -> None:
        if step.adapter_fills:
            assert self.pool is not None, "fills come with enable_lora only"
            self.pool.fill(step.adapter_fills)
        for new in step.scheduled_new_reqs:
            if new.adapter_slot != NO_SLOT:
                self.by_row[new.row] = new.adapter_slot

    def inputs(self, step: SchedulerOutput, parts: list[RowTokens], positions: NDArray[Any]) -> dict[str, Any]:
        adapter_ids = np.full(len(positions), NO_SLOT, dtype=np.int64)
        for part in parts:
            adapter_ids[part.tokens] = self.by_row[part.row]
        [sent] = self._send(adapter_ids)
        return {"adapter_ids": sent}


class RotaryOffsets(ModelState):
    """Rotary positions [3, P] of prompts in three axes; past the prompt, they follow the largest."""

    by_row: dict[int, tuple[Int32Array, int]]  # and what to add to positions past the prompt

    def __init__(self, model: CausalLM, send: Send) -> None:
        super().__init__(send)
        self._has_axes = any(table.rope.sections for table in model.config.rotary)

    def prepare(self, step: SchedulerOutput) -> None:
        for new in step.scheduled_new_reqs:
            if new.extra_inputs is not None and new.extra_inputs.rotary_positions is not None:
                if not self._has_axes:
                    limit = "this model's rotary embedding has one axis"
                    raise InvalidParameterError("rotary_positions", "positions of three axes", limit)
                rotary = np.frombuffer(new.extra_inputs.rotary_positions, dtype=np.int32).reshape(3, -1)
                self.by_row[new.row] = rotary, int(rotary.max()) + 1 - rotary.shape[1]

    def inputs(self, step: SchedulerOutput, parts: list[RowTokens], positions: NDArray[Any]) -> dict[str, Any]:
        rotary = np.tile(positions.astype(np.int64), (3, 1))
        for part in parts:
            of_prompt, shift = self.by_row[part.row]
            last = of_prompt.shape[1] - 1
            inside = of_prompt[:, np.minimum(part.positions, last)]
            rotary[:, part.tokens] = np.where(part.positions > last, part.positions + shift, inside)
        [sent] = self._send(rotary.ravel())
        return {"other_positions": sent.view(3, -1)}


class ShortAngles(ModelState):
    """Requests that stay within the first range of LongRoPE: their rows of the table are behind all others.

    Others have the angles of long contexts from their first token on: angles of two kinds would not fit each other.
    """

    by_row: dict[int, bool]

    def __init__(self, model: CausalLM, send: Send) -> None:
        super().__init__(send)
        self._first = model.config.max_model_len

    def prepare(self, step: SchedulerOutput) -> None:
        for new in step.scheduled_new_reqs:
            if new.extra_inputs is not None and new.extra_inputs.has_short_angles:
                self.by_row[new.row] = True

    def inputs(self, step: SchedulerOutput, parts: list[RowTokens], positions: NDArray[Any]) -> dict[str, Any]:
        rows = positions.astype(np.int64)
        for part in parts:
            rows[part.tokens] += self._first
        [sent] = self._send(rows)
        return {"other_positions": sent}


class TextKinds(ModelState):
    """Where the second text of a pair begins."""

    by_row: dict[int, int]

    def prepare(self, step: SchedulerOutput) -> None:
        for new in step.scheduled_new_reqs:
            if new.extra_inputs is not None and new.extra_inputs.second_text is not None:
                self.by_row[new.row] = new.extra_inputs.second_text

    def inputs(self, step: SchedulerOutput, parts: list[RowTokens], positions: NDArray[Any]) -> dict[str, Any]:
        kinds = np.zeros(len(positions), dtype=np.int64)
        for part in parts:
            kinds[part.tokens] = part.positions >= self.by_row[part.row]
        [sent] = self._send(kinds)
        return {"token_types": sent}


@dataclass(frozen=True, slots=True)
class _Replaced:
    """What replaces token embeddings of one row."""

    spans: list[tuple[int, torch.Tensor]]  # first position, and embeddings [., outputs * D] float32
    images: list[VisionInput]
    whole_spans: list[tuple[int, int]]  # [start, end) in which tokens attend to each other


class ReplacedEmbeddings(ModelState):
    """Embeddings that replace those of tokens: given ones, and images that the vision tower encodes.

    Images of a step are encoded all at once, before the step that reads them, and kept by content hash until the
    scheduler drops them. Stages without a tower encode nothing.
    """

    is_read_by_decoding = False
    by_row: dict[int, _Replaced]

    def __init__(self, model: CausalLM, send: Send) -> None:
        super().__init__(send)
        self._encoder, self._takes_images = model.encoder, model.config.vision is not None
        self._num_outputs = 1 if model.encoder is None else model.encoder.config.num_outputs
        self._encoded: dict[str, torch.Tensor] = {}  # [tokens, outputs * D] each, by content hash
        self._num_threads = torch.get_num_threads()  # all of them, also in a step that uses one

    def prepare(self, step: SchedulerOutput) -> None:
        for new in step.scheduled_new_reqs:
            extra = new.extra_inputs
            if extra is not None and extra.vision and not self._takes_images:
                raise InvalidParameterError("vision", f"{len(extra.vision)} images", "this model takes no images")
            if extra is not None and (extra.vision or extra.embedding_spans or extra.whole_spans):
                spans = []
                for span in extra.embedding_spans:
                    [embeds] = self._send(np.frombuffer(span.embeddings, dtype=np.float32).copy())
                    embeds = embeds.view(span.num_tokens, -1)  # nothing to add in layers
                    spans.append((span.start, pad(embeds, (0, (self._num_outputs - 1) * embeds.shape[1]))))
                self.by_row[new.row] = _Replaced(spans, extra.vision, extra.whole_spans)
        for content_hash in step.freed_encoder_outputs:
            self._encoded.pop(content_hash, None)
        inputs = step.scheduled_encoder_inputs
        if not inputs or self._encoder is None:
            return
        with torch_threads(self._num_threads):
            patches = torch.cat([self._patches(image) for image in inputs]).to(self._encoder.context.dtype)  # [P, C]
            encoded = self._encoder(patches, [image.grid for image in inputs])
        for image, embeddings in zip(inputs, encoded, strict=True):
            self._encoded[image.content_hash] = embeddings.clone()  # not a view of all of them

    def _patches(self, image: VisionInput) -> torch.Tensor:
        """Return the patches of an image on the device, normalized: [., C] float32."""
        assert image.patches is not None, "the scheduler sends patches with the step that encodes them"
        [flat] = self._send(image.patches.ravel())
        if image.levels is None:
            return flat.view(image.patches.shape)
        [levels] = self._send(image.levels.ravel())
        num_channels, num_levels = image.levels.shape
        channels = flat.view(len(image.patches), num_channels, -1)
        first = torch.arange(num_channels, dtype=torch.int32, device=flat.device)[:, None] * num_levels
        return levels.index_select(0, (channels.to(torch.int32) + first).flatten()).view(image.patches.shape)

    def inputs(self, step: SchedulerOutput, parts: list[RowTokens], positions: NDArray[Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        spans = [
            (part, start, end)
            for part in parts
            for start, end in self.by_row[part.row].whole_spans
            if start <= part.positions[-1] and part.positions[0] < end
        ]
        if spans:
            ends = positions.astype(np.int32) + 1
            for part, start, end in spans:
                ends[part.tokens][(part.positions >= start) & (part.positions < end)] = end
            [fields["visible_ends"]] = self._send(ends)
        if pieces := [piece for part in parts for piece in self._pieces(part)]:
            [indices] = self._send(np.concatenate([at for at, _ in pieces]))
            values = torch.cat([embeds for _, embeds in pieces])
            fields["inputs_embeds"] = InputEmbeds(indices=indices, values=values, num_outputs=self._num_outputs)
        return fields

    def _pieces(self, part: RowTokens) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
        """Yield token indices [.] and their embeddings [., outputs * D]."""
        first, end = int(part.positions[0]), int(part.positions[-1]) + 1
        replaced = self.by_row[part.row]
        spans = list(replaced.spans)
        if self._encoder is not None:  # only of images in this chunk: those of others may be gone
            touched = (each for each in replaced.images if each.start < end and first < each.start + each.num_tokens)
            spans += [(each.start, self._encoded[each.content_hash]) for each in touched]
        for start, embeds in spans:
            low, high = max(first, start), min(end, start + len(embeds))
            if low < high:
                yield np.arange(low, high) - first + part.tokens.start, embeds[low - start : high - start]


class _Drafts(NamedTuple):
    num_replayed: int  # of the step before, in this one
    num_new: int  # in this step
    first: int  # position of the first one


class LoggedDrafts(ModelState):
    """How many drafts each row has logged in its last step, and computes again in this one: `worker/draft_log.py`."""

    by_row: dict[int, _Drafts]

    def __init__(self, send: Send, max_drafts: int) -> None:
        super().__init__(send)
        self._max_drafts = max_drafts

    def prepare(self, step: SchedulerOutput) -> None:
        drafts = step.scheduled_spec_decode_tokens
        if drafts is None and not self.by_row:
            return
        counts = [0] * len(step.rows) if drafts is None else drafts.counts.tolist()
        ends = (step.num_computed_tokens + step.num_scheduled_tokens).tolist()
        for row, count, start, end in zip(
            step.rows.tolist(), counts, step.num_computed_tokens.tolist(), ends, strict=True
        ):
            before = self.by_row.pop(row, None)
            num_replayed = start - before.first if before is not None and before.num_new else 0
            assert count <= self._max_drafts, "logs have room for as many as the configuration says"
            if num_replayed or count:
                self.by_row[row] = _Drafts(num_replayed, count, end - count)

    def inputs(self, step: SchedulerOutput, parts: list[RowTokens], positions: NDArray[Any]) -> dict[str, Any]:
        found = [self.by_row.get(row, (0, 0, 0)) for row in step.rows.tolist()]
        num_replayed, num_drafts, _ = np.array(found, dtype=np.int32).T
        sent = self._send(np.ascontiguousarray(num_replayed), np.ascontiguousarray(num_drafts))
        return {"num_replayed": sent[0], "num_drafts": sent[1]}
