"""A test double of a device whose memory the host cannot read: a GPU, without one.

Its tensors are CPU tensors in a wrapper that says it is on another device. Torch ops run on what is inside; an op on
tensors of both sides raises, as on a GPU, and so does reading such a tensor as a numpy array. torch has a device type
that nothing implements here, `lazy`: it gives the wrappers a name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from octavo.device import manager
from octavo.device.base import DeviceKind, DeviceMemory, DeviceQueue
from octavo.device.manager import DeviceManager
from octavo.kernels.dispatch import select_kernels
from octavo.worker.worker import Worker

FAR = torch.device("lazy", 0)
# What may have tensors of the host beside those of the device: copies, and indices.
_CROSSES = frozenset(
    {
        *("aten::copy_", "aten::_to_copy", "aten::to", "aten::view_as", "aten::type_as"),
        *("aten::index", "aten::index_put_", "aten::index_put"),
    }
)


class FarTensor(torch.Tensor):
    """A tensor on the device; `inside` is where its numbers are."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> "FarTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inside.size(),
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=FAR,
        )
        made.inside = inside
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {FAR.type} device type tensor to numpy; copy it to the host first")
        return self.cpu().numpy()

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes contents
        return f"FarTensor({self.inside})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # as torch calls it
        """Every op on such a tensor, in any thread."""
        return _run(func, args, kwargs or {})


class FarMode(TorchDispatchMode):
    """Makes new tensors on the device, in the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's

    def __enter__(self) -> "FarMode":
        self._lifts_cpu_only = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes a tensor of the host, and then copies it
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        torch._C._set_only_lift_cpu_tensors(self._lifts_cpu_only)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, leaves = func._schema.name, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    far = [leaf for leaf in leaves if isinstance(leaf, FarTensor)]
    near = [leaf for leaf in leaves if not isinstance(leaf, FarTensor) and leaf.dim() > 0]
    if far and near and name not in _CROSSES:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {FAR} and cpu")
    is_far = bool(far)
    if named := [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]:
        is_far = named[0].type == FAR.type
    elif name in _CROSSES:
        is_far = isinstance(args[0], FarTensor)
        if far and not is_far and name.startswith("aten::index"):
            raise RuntimeError(f"{name}: indices of {FAR} for a tensor of cpu")

    def inside(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value.inside if isinstance(value, FarTensor) else value

    def wrapped(value: Any) -> Any:
        if not is_far or not isinstance(value, torch.Tensor):
            return value
        return next((leaf for leaf in far if leaf.inside is value), FarTensor(value))

    # A wrapper cannot be what inference mode makes of a tensor.
    with torch.inference_mode(False), torch.no_grad():
        return tree_map(wrapped, func(*tree_map(inside, args), **tree_map(inside, kwargs)))


class FarKind(DeviceKind):
    """See `DeviceKind`."""

    name, ranks_share_memory, default_memory_utilization = FAR.type, False, 0.9
    make_queue: ClassVar[Callable[[], DeviceQueue | None]] = lambda: None

    def is_available(self) -> bool:
        return True

    def memory(self) -> DeviceMemory:
        return DeviceMemory(total_bytes=1 << 30, free_bytes=1 << 30)

    def supports(self, dtype: torch.dtype) -> bool:
        return True

    def describe(self) -> dict[str, str]:
        return {"processor": "none"}

    def queue(self) -> DeviceQueue | None:
        return type(self).make_queue()


def _in_far_mode(method: Callable[..., Any]) -> Callable[..., Any]:
    """Modes belong to threads, and a rank is called from several."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with FarMode():
            return method(*args, **kwargs)

    return call


@contextmanager
def far_devices(make_queue: Callable[[], DeviceQueue | None] = lambda: None) -> Iterator[None]:
    """Let `device="xpu"` be such a device, for engines in this process."""
    make = DeviceManager.__init__

    def init(devices: DeviceManager, device: str = "auto", threads: int | None = None, index: int = 0) -> None:
        make(devices, device, threads, index)
        if device == "xpu":
            devices.device, devices.kernels = FAR, partial(select_kernels, FAR)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(manager._KINDS, "xpu", (__name__, FarKind.__name__))
        patch.setattr(DeviceManager, "__init__", init)
        patch.setattr(FarKind, "make_queue", make_queue)
        for name, method in vars(Worker).items():
            if isinstance(method, FunctionType):
                patch.setattr(Worker, name, _in_far_mode(method))
        yield
