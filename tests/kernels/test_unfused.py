"""Layers with adapters take fused ops apart. Without any addition the bits are the same, for weights of every form."""

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.breadth import each
from tests.kernels.conftest import native
from tests.kernels.levels import LEVEL_DTYPES, LEVELS
from tests.kernels.ops import OTHERS
from tests.kernels.test_blocks import kernels_of, weight_of

from octavo.kernels.native import NativeKernels
from octavo.kernels.quantization import IntegerFormat
from octavo.kernels.types import SILU, Activation, Fused, LinearRole, PackedLinear

FORMS = [
    *(IntegerFormat(bits=bits, group_size=size) for bits in (8, 4) for size in (None, 64)),
    IntegerFormat(bits=4, group_size=None, is_two_level=True),
    IntegerFormat(bits=8, group_size=None, rotation="row"),
]
ODD, WHOLE_BLOCKS = (100, 84), (512, 256)  # inputs, intermediate size
Pack = Callable[[int, int, LinearRole], PackedLinear]  # num_outputs, in_size


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check(
    kernels: NativeKernels,
    pack: Pack,
    activation: Activation,
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int] = ODD,
) -> None:
    in_size, size = sizes
    up = pack(2 * size, in_size, "gated") if activation.is_gated else pack(size, in_size, "plain")
    down, qkv = pack(in_size, size, "plain"), pack(size, in_size, "plain")
    for count in (1, 7, 50):
        x, residual = random(count, in_size, dtype=dtype), random(count + 1, in_size, dtype=dtype)[1:]
        norm = random(in_size, dtype=dtype)
        fused = Fused(residual=residual, norm_weight=norm, eps=1e-5, activation=activation)
        normed, total = kernels.add_rms_norm(x, fused)
        both = kernels.gated_linear(normed, up) if activation.is_gated else kernels.linear(normed, up)
        assert both.shape == (count, up.num_outputs)
        activated = kernels.activate(both, activation)
        assert torch.equal(activated, kernels.activated_linear(normed, up, activation))
        out, same_total = kernels.mlp(x, fused, up, down)
        assert torch.equal(kernels.linear(activated, down), out)
        assert torch.equal(total, same_total)
        assert torch.equal(kernels.linear(normed, qkv), kernels.normed_linear(x, fused, qkv)[0])


def activations() -> Iterator[Activation]:
    yield SILU
    yield from OTHERS


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
@each("activation", [*activations()])
def test_dense(activation: Activation, level: str, dtype: torch.dtype) -> None:
    kernels = native(level, 2, dtype)

    def pack(num_outputs: int, in_size: int, role: LinearRole) -> PackedLinear:
        weight, bias = random(num_outputs, in_size, dtype=dtype) * in_size**-0.5, random(num_outputs, dtype=dtype)
        return kernels.pack_linear(weight, bias, role)

    check(kernels, pack, activation, dtype)


@pytest.mark.parametrize("level", LEVELS)
@each("form", FORMS)
def test_integers(form: IntegerFormat, level: str) -> None:
    kernels = native(level, 2)

    def pack(num_outputs: int, in_size: int, role: LinearRole) -> PackedLinear:
        weight = random(num_outputs, in_size) * in_size**-0.5
        return kernels.pack_linear(weight, random(num_outputs), role, form)

    check(kernels, pack, SILU, sizes=(320, 208) if form.group_size else ODD)


@pytest.mark.parametrize("level", LEVELS)
@each("kind", ["Q8_0", "Q4_K", "Q6_K"])
def test_blocks(kind: str, level: str) -> None:
    kernels = kernels_of(level)

    def pack(num_outputs: int, in_size: int, role: LinearRole) -> PackedLinear:
        sizes = [num_outputs // 2] * 2 if role == "gated" else [num_outputs]
        weight = weight_of(*((kind, size) for size in sizes), in_size=in_size)
        return kernels.pack_linear(weight, random(num_outputs).float(), role, weight.format)

    check(kernels, pack, SILU, sizes=WHOLE_BLOCKS)
