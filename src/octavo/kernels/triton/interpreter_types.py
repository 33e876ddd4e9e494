"""Patches that make Triton's interpreter several times faster: what depends on types alone is computed once.

As of Triton 3.6 every tensor and every block type, of which an addition makes about ten, builds the tuple of its shape
and a type for that tuple, and every addition of integers computes a check for overflow whose result is then dropped.
"""

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from triton import language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter


class _Shape(NamedTuple):
    """What types and tensors of one shape share. Immutable."""

    sizes: Any  # tl.tuple of int: the shape of a block type
    numel: int
    name: str
    constants: Any  # tl.tuple of tl.constexpr: the shape of a tensor
    constant_numel: Any


def speed_up() -> None:
    """Patch the interpreter of this process. Idempotent."""
    tl.core.block_type.__init__ = _make_block_type
    tl.core.tensor.__init__ = _make_tensor
    interpreter.TritonSemantic.broadcast_impl_value = _broadcast
    interpreter._get_np_dtype = _numpy_dtype
    options = interpreter.interpreter_builder.options
    if not options.debug:  # where the check for overflow would not be asserted
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


_broadcast_unequal = interpreter.TritonSemantic.broadcast_impl_value
_numpy_dtype_unrepaired = functools.cache(interpreter._get_np_dtype)


@functools.cache
def _shape(sizes: tuple[int, ...]) -> _Shape:
    """Return the shared objects of a shape, after the checks of a block type."""
    shape = tl.tuple(sizes)
    return _Shape(shape, validate_block_shape(shape), str(shape), *_constants(sizes))


def _constants(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


_NO_SIZES = _constants(())


def _make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """A block type's `__init__`. Equal shapes are one object afterwards."""
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.made_of = _shape(sizes)
    self.shape, self.numel = self.made_of.sizes, self.made_of.numel
    self.name = f"<{self.made_of.name}, {element_ty}>"


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    """A tensor's `__init__`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.made_of[-2:] if type.is_block() else _NO_SIZES


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    """Broadcast two operands; most have the same shape already."""
    left, right = lhs.type, rhs.type
    if left.is_block() and right.is_block() and left.shape is right.shape:
        return lhs, rhs
    return _broadcast_unequal(self, lhs, rhs)


def _numpy_dtype(dtype: Any) -> Any:
    """Return numpy's type for the elements of a Triton type."""
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _numpy_dtype_unrepaired(scalar)
