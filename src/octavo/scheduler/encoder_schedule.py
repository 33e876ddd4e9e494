"""Images of running requests: which of them a step encodes, and whose embeddings the ranks keep.

Embeddings are cached by content. A running request holds those whose tokens it is about to compute; those without a
holder are evicted when their space is needed, least recently used first, so that an image that is sent repeatedly is
encoded once. A step encodes at most as many image tokens as it computes tokens; a larger image gets a step of its own.

Tokens that attend to each other, as those of an image in some models, are computed in one step: chunks end before or
after such a span.

No deadlock: a request holds an embedding only from the step that computes the first token of the image, so it can
always continue to the last one, where it releases the embedding.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from octavo.contracts.engine import ExtraInputs, VisionInput
from octavo.contracts.schedule import Int32Array, SchedulerOutput
from octavo.scheduler.block_manager import BlockKeys
from octavo.scheduler.gate import Gate
from octavo.scheduler.request import Request
from octavo.scheduler.running import RowIndices, RunningRows

_NO_INPUTS = ExtraInputs()


class EncoderSchedule(Gate):
    """A gate that holds nobody. Rows without images, and those past their images, are unknown here and cost nothing."""

    reason = "encoder"

    def __init__(self, running: RunningRows, step_budget: int, capacity: int) -> None:
        self._running, self._step_budget, self._capacity = running, step_budget, capacity
        self._kept: OrderedDict[str, int] = OrderedDict()  # tokens by content hash, least recently used first
        self._held: dict[int, set[str]] = {}  # by row; a row is here until its images are computed
        self._inputs: list[VisionInput] = []  # of the step being built
        self._freed: list[str] = []

    @property
    def held_contents(self) -> set[str]:
        """Content hashes of the embeddings that rows hold."""
        return set().union(*self._held.values())

    def hold(self, request: Request) -> bool:
        """Prepare a request with images or spans. Each image fits: the frontend refuses larger ones."""
        extra = _extra(request)
        request.limits_chunks = bool(extra.vision or extra.whole_spans)
        for image in extra.vision:
            assert 0 < image.num_tokens <= self._capacity, f"{image.num_tokens} of {self._capacity} tokens"
        if extra.vision:  # patches come with the step that encodes them
            vision = [msgspec.structs.replace(image, patches=None, levels=None) for image in extra.vision]
            request.extra_inputs = msgspec.structs.replace(extra, vision=vision)
            request.block_keys = block_keys(extra.vision, self._running.blocks.block_size)
        return False

    def begin_step(self) -> None:
        """Release the images that rows have computed: their steps precede those that may reuse the space."""
        for row in list(self._held):
            computed = int(self._running.num_computed[row])
            request = self._running.request_at(row)
            self._held[row] &= {image.content_hash for image in _extra(request).vision if image.end > computed}
            if _is_past_images(request, computed):
                del self._held[row]

    def limit_running(self, rows: RowIndices, counts: Int32Array) -> tuple[RowIndices, Int32Array]:
        """Encode what `rows` [R] need for the next `counts` [R] tokens; return how far they get."""
        if not self._held:
            return rows, counts
        limited = counts.copy()
        for index in np.isin(rows, list(self._held)).nonzero()[0].tolist():
            row = int(rows[index])
            limited[index] = self._advance(row, int(self._running.num_computed[row]), int(counts[index]))
        if (limited > 0).all():
            return rows, limited
        return rows[limited > 0], limited[limited > 0]

    def can_begin(self, request: Request, num_computed: int, budget: int) -> bool:
        """Return whether a waiting request's first token could be computed in this step of `budget` tokens."""
        if not _to_cut(request, num_computed, budget):
            return False
        images = _extra(request).vision
        return all(self._fits(image) for image in images if image.start <= num_computed < image.end)

    def admit(self, request: Request, budget: int) -> int:
        """Encode what a request that has just got its row needs for `budget` tokens; return how far it gets."""
        row = request.row
        assert row is not None
        num_computed = int(self._running.num_computed[row])
        if _is_past_images(request, num_computed):
            return budget
        self._held[row] = set()
        return self._advance(row, num_computed, budget)

    def release(self, row: int) -> None:
        """Release everything that a row holds: its request has ended, or is preempted."""
        self._held.pop(row, None)

    def add_to_step(self, output: SchedulerOutput, rows: RowIndices) -> SchedulerOutput:
        """Add what the step encodes, and the content hashes that ranks must drop before."""
        if not (self._inputs or self._freed):
            return output
        inputs, freed, self._inputs, self._freed = self._inputs, self._freed, [], []
        return replace(output, scheduled_encoder_inputs=inputs, freed_encoder_outputs=freed)

    def after_failed_step(self, output: SchedulerOutput) -> Sequence[Request]:
        """Drop what the step should have encoded."""
        for image in output.scheduled_encoder_inputs:
            if self._kept.pop(image.content_hash, None) is not None:
                self._freed.append(image.content_hash)
        return ()

    def check_integrity(self) -> None:
        """Assert that rows hold what is kept."""
        assert self.held_contents <= self._kept.keys()
        assert sum(self._kept.values()) <= self._capacity
        assert self._held.keys() <= set(self._running.active.tolist())

    def _advance(self, row: int, start: int, count: int) -> int:
        """Hold the images of a row's `count` tokens from `start` on, up to the first that does not fit."""
        request = self._running.request_at(row)
        count = _to_cut(request, start, count)
        for image in _extra(request).vision:
            if image.end <= start:
                continue
            if image.start >= start + count:
                break
            if not self._fits(image):
                return max(image.start - start, 0)
            self._hold(row, image)
        return count

    def _fits(self, image: VisionInput) -> bool:
        """Return whether an image's embeddings are kept, or can be computed in this step."""
        if image.content_hash in self._kept:
            return True
        num_scheduled = sum(other.num_tokens for other in self._inputs)
        if self._inputs and num_scheduled + image.num_tokens > self._step_budget:
            return False
        num_held = sum(self._kept.get(content, 0) for content in self.held_contents)
        return num_held + image.num_tokens <= self._capacity

    def _hold(self, row: int, image: VisionInput) -> None:
        content = image.content_hash
        if content not in self._kept:
            num_kept, held = sum(self._kept.values()), self.held_contents
            for other in [other for other in self._kept if other not in held]:
                if num_kept + image.num_tokens <= self._capacity:
                    break
                num_kept -= self._kept.pop(other)
                self._freed.append(other)
            self._kept[content] = image.num_tokens
            self._inputs.append(image)
        self._kept.move_to_end(content)
        self._held[row].add(content)


def _is_past_images(request: Request, num_computed: int) -> bool:
    """Return whether nothing limits a request's chunks any more."""
    extra = _extra(request)
    ends = [*(image.end for image in extra.vision), *(end for _, end in extra.whole_spans)]
    return max(ends, default=0) <= num_computed


def _to_cut(request: Request, start: int, count: int) -> int:
    """Return how many of a request's `count` tokens from `start` on a step computes without cutting a span."""
    for span_start, span_end in _extra(request).whole_spans:
        if span_start < start + count < span_end:
            return max(span_start - start, 0)
    return count


def _extra(request: Request) -> ExtraInputs:
    return request.message.extra_inputs or _NO_INPUTS


def block_keys(images: Sequence[VisionInput], block_size: int) -> BlockKeys:
    """Return the keys of the blocks that have tokens of images: of each, its hash and the block's offset in it."""
    keys: dict[int, bytes] = {}
    for image in images:
        for block in range(image.start // block_size, -(-image.end // block_size)):
            offset = (block * block_size - image.start).to_bytes(8, "little", signed=True)
            keys[block] = keys.get(block, b"") + bytes.fromhex(image.content_hash) + offset
    return keys
