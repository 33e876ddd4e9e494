"""Sees to it that a recording misses nothing: a torch op computes once, while layers are recorded, and never again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.errors import RecordingError

_MEMORY = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})


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


class _Refusal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, inside: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inside = inside

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.name()
        if not func.is_view and name.partition(".")[0] not in _MEMORY:
            raise RecordingError(
                f"{name} in {self._inside[-1]}: a recording of the step would miss it; "
                "compute by the kernels, or set is_recordable = False on the layer, whose model then runs op by op"
            )
        return func(*args, **(kwargs or {}))
