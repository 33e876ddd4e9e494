"""A test double of a device with a queue, on CPU tensors. It fails where a CUDA graph would fail.

A capture records every torch op with its tensors. A replay runs the ops again on the current contents of those tensors
and writes to the memory of the original results. Python code between the ops does not run again, so numbers passed to a
launch stay as captured. Whatever is forbidden during a capture on a device is an error here: reading values on the
host, creating tensors from host numbers, and shapes that depend on values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS_VALUES = frozenset(
    {
        *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"),
        *("aten::bincount", "aten::repeat_interleave", "aten::lift_fresh"),
    }
)


class NotCapturableError(RuntimeError):
    """An op that cannot be captured."""


@dataclass(slots=True)
class RecordedQueue:
    """See `DeviceQueue`. Work is done at launch; `captures` counts the captures."""

    captures: int = 0
    num_waits: int = 0
    replays: list[int] = field(default_factory=list)  # the number of the capture for each replay

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)  # garbage: uninitialized memory

    def mark(self) -> Callable[[], None]:
        return self._wait

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        recording = _Recording()
        with recording:
            step()
        return self._captured(recording.replay)

    def _captured(self, repeat: Callable[[], None]) -> Callable[[], None]:
        number, self.captures = self.captures, self.captures + 1

        def replay() -> None:
            self.replays.append(number)
            repeat()

        return replay

    def _wait(self) -> None:
        self.num_waits += 1


class CalledQueue(RecordedQueue):
    """For kernels that are not torch ops and so are invisible to the recording: a replay calls the step again."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        return self._captured(step)


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no type for it
    """The ops of a step with their arguments and result tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no type for it
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name().partition(".")[0] in _READS_VALUES or _has_mask(func, args):
            raise NotCapturableError(f"{func.name()} cannot be captured")
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, before in self._calls:
            results = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(results), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _has_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an indexed read or write uses a boolean mask, whose result shape depends on values."""
    if not func.name().startswith("aten::index"):
        return False
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1]))
