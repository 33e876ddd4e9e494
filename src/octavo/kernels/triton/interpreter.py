"""Patches for Triton's interpreter, which runs kernels on a CPU with numpy: a GPU's results, and several times faster.

As of Triton 3.6 it truncates where a GPU rounds to nearest, loses carries when it rounds to 8 bits, multiplies the bit
patterns of bfloat16 numbers as integers, and breaks with numpy 2.4 and later. Every tensor and every block type, of
which an addition makes about ten, builds the tuple of its shape and a type for that tuple, and every addition of
integers computes a check for overflow whose result is then dropped: what depends on types alone is computed once here.
"""

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from triton import language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter

_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_PRODUCTS_AT_A_TIME = 16
_KEPT_AS_INTEGERS = (tl.bfloat16, tl.float8e4nv, tl.float8e5)


def repair() -> None:
    """Patch the interpreter of this process. Idempotent."""
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter._patch_lang_tensor = _patch_tensor
    interpreter._patch_lang = _patch_language
    interpreter.InterpretedFunction.__call__ = _call_function
    tl.core.block_type.__init__ = _make_block_type
    tl.core.tensor.__init__ = _make_tensor
    interpreter.TritonSemantic.broadcast_impl_value = _broadcast
    interpreter._get_np_dtype = _numpy_dtype
    interpreter.TritonSemantic.binary_op_type_checking_impl = _alike
    tl.core._unwrap_if_constexpr = _unwrapped
    options = interpreter.interpreter_builder.options
    if not options.debug:  # where the check for overflow would not be asserted
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


_patch_tensor_unrepaired = interpreter._patch_lang_tensor
_patch_language_unrepaired = interpreter._patch_lang


def _patch_tensor(tensor: Any, scope: Any) -> None:
    """Let loops run to loaded bounds: since numpy 2.4, one-element arrays no longer convert to numbers."""
    _patch_tensor_unrepaired(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a kernel, which has patched the language already: patching again took half the time."""
    return self.rewrite()(*args, **kwargs)


def _patch_language(fn: Any) -> Any:
    """Make a kernel's language that of numpy, also under the name that functions of the language itself use."""
    scope = _patch_language_unrepaired(fn)
    interpreter._patch_builtin(tl.core, interpreter.interpreter_builder, scope)
    interpreter._patch_lang_core(tl.core, scope)
    return scope


def _convert_float(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Convert between floats, to nearest, ties to even. Returns bits, as the interpreter stores them."""
    bits = np.ascontiguousarray(values).view(f"int{source.primitive_bitwidth}")
    converted = torch.from_numpy(bits).view(_TORCH[source]).to(_TORCH[target])
    target_bits = converted.view(getattr(torch, f"int{target.primitive_bitwidth}")).numpy()
    return target_bits.view(f"uint{target.primitive_bitwidth}")


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Multiply in the accumulator's dtype, float32 or int32, which is exact for products of narrower numbers.

    Floats as tensor cores do: 16 products at a time are summed, nearly exactly, and added to the sum so far. So bits do
    not depend on the size of the tile.
    """
    left, right = (_widened(operand, d.data.dtype) for operand in (a, b))
    if d.data.dtype != np.float32:
        return interpreter.TensorHandle(np.einsum("...mk,...kn->...mn", left, right) + d.data, d.dtype.scalar)
    num_products = min(_PRODUCTS_AT_A_TIME, left.shape[-1])
    parts = np.einsum(
        "...mck,...ckn->c...mn",
        left.astype(np.float64).reshape(*left.shape[:-1], -1, num_products),
        right.astype(np.float64).reshape(*right.shape[:-2], -1, num_products, right.shape[-1]),
    )
    total = d.data
    for part in parts:
        total = (total + part).astype(np.float32)
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _widened(operand: Any, dtype: Any) -> Any:
    if operand.dtype.scalar in _KEPT_AS_INTEGERS:
        return _convert_float(operand.data, operand.dtype.scalar, tl.float32, None).view(np.float32)
    return operand.data.astype(dtype)


class _Shape(NamedTuple):
    """What types and tensors of one shape share. Immutable."""

    sizes: Any  # tl.tuple of int: the shape of a block type
    numel: int
    name: str
    constants: Any  # tl.tuple of tl.constexpr: the shape of a tensor
    constant_numel: Any


_unwrap_unrepaired = tl.core._unwrap_if_constexpr
_PLAIN = frozenset({tl.tensor, tl.block_type, int, bool, float, str, type(None)})
_make_alike = interpreter.TritonSemantic.binary_op_type_checking_impl
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


def _unwrapped(value: Any) -> Any:
    """Return what a `tl.constexpr` holds, also in tuples and lists; nearly all others are as they are."""
    return value if type(value) in _PLAIN else _unwrap_unrepaired(value)


def _alike(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    """Return operands with the dtype and shape of the result; two tensors of one dtype need only the shape."""
    if (
        type(lhs) is type(rhs) is tl.tensor
        and lhs.dtype is rhs.dtype
        and type(lhs.dtype) is tl.dtype
        and not kwargs.get("div_or_mod")
        and len(args) < 4
    ):
        return _broadcast(self, lhs, rhs)
    return _make_alike(self, lhs, rhs, *args, **kwargs)


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
