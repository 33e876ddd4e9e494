"""A test double of a device with a queue, on CPU tensors: what a CUDA graph would get wrong, this one gets wrong, too.

A capture keeps every op of torch with the tensors it was given. A replay runs them again, on what those tensors hold
then, and writes to the memory that the first results had. Python between the ops is not run again, so a number that
went into a launch stays what it was. What a capture on a device forbids is an error here: to read a value on the host,
to make a tensor of a host's numbers, to let a shape depend on values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS_VALUES = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::masked_select",
        "aten::_unique2",
        "aten::equal",
        "aten::bincount",
        "aten::repeat_interleave",
        "aten::lift_fresh",
    }
)


class NotCapturableError(RuntimeError):
    """An op that a device does not record."""


@dataclass(slots=True)
class RecordedQueue:
    """See `DeviceQueue`. Work is done when it is launched; `captures` counts the recordings."""

    captures: int = 0
    num_waits: int = 0
    replays: list[int] = field(default_factory=list)  # the number of each capture that was replayed

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)  # nobody may count on what is in it

    def mark(self) -> Callable[[], None]:
        return self._wait

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        recording = _Recording()
        with recording:
            step()
        number, self.captures = self.captures, self.captures + 1

        def replay() -> None:
            self.replays.append(number)
            recording.replay()

        return replay

    def _wait(self) -> None:
        self.num_waits += 1


class CalledQueue(RecordedQueue):
    """For kernels that are no ops of torch, which a recording would not see: a replay calls the step again."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        number, self.captures = self.captures, self.captures + 1

        def replay() -> None:
            self.replays.append(number)
            step()

        return replay


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The ops of a step, with their arguments and the tensors that they made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
    """Whether an indexed read or write picks by a mask: how much that is, only the values know."""
    if not func.name().startswith("aten::index"):
        return False
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1]))
