"""Patches for Triton's interpreter, which runs kernels on a CPU with numpy: results must match a GPU's.

As of Triton 3.6 it truncates where a GPU rounds to nearest, loses carries when it rounds to 8 bits, multiplies the bit
patterns of bfloat16 numbers as integers, and breaks with numpy 2.4 and later.
"""

from typing import Any

import numpy as np
import torch
from triton import knobs
from triton import language as tl
from triton.runtime import interpreter

from octavo.kernels.triton.interpreter_types import speed_up

_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_KEPT_AS_INTEGERS = (tl.bfloat16, tl.float8e4nv, tl.float8e5)


def is_interpreting() -> bool:
    """Return whether kernels of this process are interpreted: `TRITON_INTERPRET` was set when Triton was imported."""
    return bool(knobs.runtime.interpret)


def repair() -> None:
    """Patch the interpreter of this process. Idempotent."""
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter._patch_lang_tensor = _patch_tensor
    interpreter._patch_lang = _patch_language
    interpreter.InterpretedFunction.__call__ = _call_function
    speed_up()


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

    Without BLAS, which sums some rows of a matrix in another order than others.
    """
    left, right = (_widened(operand, d.data.dtype) for operand in (a, b))
    return interpreter.TensorHandle(np.einsum("...mk,...kn->...mn", left, right) + d.data, d.dtype.scalar)


def _widened(operand: Any, dtype: Any) -> Any:
    if operand.dtype.scalar in _KEPT_AS_INTEGERS:
        return _convert_float(operand.data, operand.dtype.scalar, tl.float32, None).view(np.float32)
    return operand.data.astype(dtype)
