"""Guards recordings: a torch op would compute once, while layers are recorded, and be missing from every replay."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode  # a TorchDispatchMode sees more, but imports Triton at start

from octavo.errors import RecordingError

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
_READS = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"})
_WRITES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__"})


@contextmanager
def refuse_torch_ops(model: nn.Module) -> Iterator[None]:
    """Allow torch to make memory and views of it, and nothing else.

    Raises:
        RecordingError: another op was called; the message names it, and the innermost layer that was running.
    """
    inside = [type(model).__name__]  # layers that are running, the innermost last

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.callback(module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)).remove)
                leave = module.register_forward_hook(lambda *_: _leave(inside), always_call=True)
                hooks.callback(leave.remove)
        with _Refusal(inside):
            yield


def _leave(inside: list[str]) -> None:
    inside.pop()


class _Refusal(TorchFunctionMode):
    """Allows what allocates, and what returns a view of its arguments or no tensor at all."""

    def __init__(self, inside: list[str]) -> None:
        super().__init__()
        self._inside = inside

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        result = func(*args, **kwargs)
        if name not in _ALLOCATIONS and (_touches_values(name, kwargs) or not _is_view(result, (args, kwargs))):
            raise RecordingError(
                f"{name} in {self._inside[-1]}: a recording of the step would miss it; "
                "compute by the kernels, or set is_recordable = False on the layer, whose model then runs op by op"
            )
        return result


def _touches_values(name: str, kwargs: dict[str, Any]) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in _READS or name in _WRITES or kwargs.get("out") is not None


def _is_view(result: Any, arguments: Any) -> bool:
    """Say whether all tensors in `result` lie in memory of the tensors in `arguments`."""
    known = {tensor.untyped_storage().data_ptr() for tensor in _tensors(arguments)}
    return all(tensor.untyped_storage().data_ptr() in known for tensor in _tensors(result))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
