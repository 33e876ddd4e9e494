"""Runs the vision tower: the images of a step, all at once, before the step that reads their embeddings.

Legend: P = patches of all images of the step, C = values of a patch, D = hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from octavo.contracts.engine import VisionInput
from octavo.contracts.schedule import SchedulerOutput
from octavo.models.vision import VisionTower
from octavo.worker.request_rows import RequestRows


class EncoderRunner:
    """Keeps embeddings by content hash until the scheduler drops them. Does nothing on stages without a tower."""

    def __init__(self, encoder: VisionTower | None, rows: RequestRows) -> None:
        self._encoder, self._rows = encoder, rows
        self._encoded: dict[str, torch.Tensor] = {}  # [tokens, outputs * D] each
        self._num_threads = torch.get_num_threads()
        if encoder is not None:
            rows.extra.attach_encoder(self._encoded, encoder.config.num_outputs)

    def run(self, scheduler_output: SchedulerOutput) -> None:
        """Drop the embeddings that the step lists, then encode its images."""
        for content_hash in scheduler_output.freed_encoder_outputs:
            self._encoded.pop(content_hash, None)
        inputs = scheduler_output.scheduled_encoder_inputs
        if not inputs or self._encoder is None:
            return
        with _threads(self._num_threads):
            patches = torch.cat([self._patches(image) for image in inputs]).to(self._encoder.context.dtype)  # [P, C]
            encoded = self._encoder(patches, [image.grid for image in inputs])
        for image, embeddings in zip(inputs, encoded, strict=True):
            self._encoded[image.content_hash] = embeddings.clone()  # not a view of all of them

    def _patches(self, image: VisionInput) -> torch.Tensor:
        """Return the patches of an image on the device, normalized: [., C] float32."""
        assert image.patches is not None, "the scheduler sends patches with the step that encodes them"
        [flat] = self._rows.send(image.patches.ravel())
        if image.levels is None:
            return flat.view(image.patches.shape)
        [levels] = self._rows.send(image.levels.ravel())
        num_channels, num_levels = image.levels.shape
        channels = flat.view(len(image.patches), num_channels, -1)
        first = torch.arange(num_channels, dtype=torch.int32, device=flat.device)[:, None] * num_levels
        return levels.index_select(0, (channels.to(torch.int32) + first).flatten()).view(image.patches.shape)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run torch ops on `count` threads: a step of recorded native calls uses one (see `graph.one_torch_thread`)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
