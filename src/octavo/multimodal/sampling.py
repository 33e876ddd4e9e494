"""Which frames of a video a model gets: a number given by rate or count, spread over the duration."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from octavo.config.json_fields import JsonFields
from octavo.config.vision import VisionConfig
from octavo.errors import InvalidParameterError


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameSampling:
    """The settings in `video_preprocessor_config.json`, and the rule of the family."""

    fps: float  # frames per second of the video, unless a request says otherwise
    num_frames: int | None  # instead of `fps`
    min_frames: int
    max_frames: int
    multiple: int  # the number of frames is rounded down to one
    reaches_last: bool  # the last frame is sampled too (Qwen3-VL); else the first of each of equal parts (Qwen2-VL)

    @classmethod
    def read(cls, fields: JsonFields, vision: VisionConfig) -> Self:
        """Read the settings of a checkpoint with this tower.

        Raises:
            CheckpointError: they are malformed.
        """
        return cls(
            fps=fields.number("fps", 2.0),
            num_frames=fields.integer("num_frames") if "num_frames" in fields else None,
            min_frames=fields.integer("min_frames", 4),
            max_frames=fields.integer("max_frames", 768),
            multiple=1 if vision.has_frame_times else vision.temporal_patch_size,
            reaches_last=vision.has_frame_times,
        )

    def indices(self, total: int, rate: float, name: str, fps: float | None, num_frames: int | None) -> list[int]:
        """Return which of `total` frames, `rate` a second, are seen: `num_frames`, or `fps` a second, or by default.

        Raises:
            InvalidParameterError: more frames than the video has, or than the model takes.
        """
        asked = num_frames if num_frames is not None or fps is not None else self.num_frames
        count = (
            self._by_rate(total, rate, fps or self.fps)
            if asked is None
            else round(asked / self.multiple) * self.multiple
        )
        if not 0 < count <= min(total, self.max_frames):
            limit = f"1 to {min(total, self.max_frames)}: of {total} in the video, of {self.max_frames} for the model"
            raise InvalidParameterError(f"{name}.num_frames", count, limit)
        if self.reaches_last:
            spread: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
            return spread
        return [at * total // count for at in range(count)]

    def _by_rate(self, total: int, rate: float, fps: float) -> int:
        return self._rounded(min(max(total / rate * fps, self.min_frames), self.max_frames, total))

    def _rounded(self, count: float) -> int:
        return max(int(count) // self.multiple * self.multiple, 1)
