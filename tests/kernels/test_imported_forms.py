"""Blocks of other programs' formats, as their descriptions define them, in our forms: the same weights to the last bit.

How the formats of other programs map to `QuantizedWeight`; d, e, s, m, z are read as float32, n is the stored
integer:

- GPTQ and AWQ (after undoing its nibble order), 4 bits, groups of 32, 64 or 128: w = s * (n - z). q = n - 8,
  scale s, offset s * (8 - z).
- GGUF Q4_0, groups of 32: w = d * (n - 8). q = n - 8, scale d.
- GGUF Q4_1, groups of 32: w = d * n + m. q = n - 8, scale d, offset m + 8 * d.
- GGUF Q4_K, groups of 32: w = (d * s) * n - e * t. q = n - 8, scale d * s, offset 8 * d * s - e * t.
- GGUF Q8_0, groups of 32: w = d * q. 8 bits.
- GGUF Q6_K, groups of 16: w = (d * s) * (n - 32). 8 bits, groups of 32, in two weights, one with zeros in the odd
  groups of 16 and one with zeros in the even ones; the importer has to add their results.

The offsets of Q4_1 and Q4_K are sums of two numbers: exact unless these differ so much in magnitude that float32
cannot hold both.

Legend: N = outputs, K = inputs, G = groups of inputs.
"""

import pytest
import torch
from tests.kernels.conftest import InOneForm
from tests.kernels.levels import LEVELS

from octavo.kernels.quantization import IntegerFormat, QuantizedWeight

NUM_OUTPUTS, IN_SIZE = 48, 512  # two blocks of 256


def form(bits: int, group_size: int) -> IntegerFormat:
    return IntegerFormat(bits=bits, group_size=group_size)


def source() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=source())


def halves(*shape: int, seed: int = 1) -> torch.Tensor:
    """Return float16 numbers as scales are, read as float32: 0.002 to 0.032."""
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return (0.002 + 0.03 * uniform).half().float()


def widen(of_groups: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return [N, G] as [N, K]."""
    return of_groups.repeat_interleave(group_size, dim=1)


def assert_same(weight: QuantizedWeight, expected: torch.Tensor) -> None:
    """Compare weights to the bit, and what every level computes from them."""
    assert torch.equal(weight.dequantized().double(), expected)
    form = weight.format
    assert isinstance(form, IntegerFormat)
    x = torch.randn(3, IN_SIZE, generator=source()).to(torch.bfloat16)
    scale = x.float().abs().amax(dim=1, keepdim=True) / 127  # [T, 1]
    rounded = (x.float() * (torch.tensor(127.0) / (scale * 127))).round().double() * scale.double()
    for level in LEVELS:
        kernels = InOneForm(level, form)
        result = kernels.logits_linear(x, kernels.pack_linear(weight, None, "plain", form)).double()
        torch.testing.assert_close(result, rounded @ expected.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_gptq_and_awq(group_size: int) -> None:
    """w = s * (n - z), n and z of 4 bits; AWQ differs in the order of nibbles in a word only."""
    num_groups = IN_SIZE // group_size
    n, z, s = (
        integers(0, 15, NUM_OUTPUTS, IN_SIZE),
        integers(0, 15, NUM_OUTPUTS, num_groups),
        halves(NUM_OUTPUTS, num_groups),
    )
    weight = QuantizedWeight(format=form(4, group_size), values=(n - 8).to(torch.int8), scales=s, offsets=s * (8 - z))
    assert_same(weight, widen(s, group_size).double() * (n - widen(z, group_size)))


def test_awq_order_of_nibbles() -> None:
    """A word of AWQ holds outputs 0, 2, 4, 6, 1, 3, 5, 7, from its lowest nibble on."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    n = integers(0, 15, IN_SIZE, NUM_OUTPUTS)  # AWQ keeps [K, N]
    words = (n.view(IN_SIZE, -1, 8)[..., order] << (4 * torch.arange(8))).sum(dim=-1)
    nibbles = (words[..., None] >> (4 * torch.arange(8))) & 15
    assert torch.equal(nibbles[..., order.argsort()].reshape(IN_SIZE, NUM_OUTPUTS), n)


def test_gguf_q4_0() -> None:
    """w = d * (n - 8)."""
    n, d = integers(0, 15, NUM_OUTPUTS, IN_SIZE), halves(NUM_OUTPUTS, IN_SIZE // 32)
    weight = QuantizedWeight(format=form(4, 32), values=(n - 8).to(torch.int8), scales=d)
    assert_same(weight, widen(d, 32).double() * (n - 8))


def test_gguf_q4_1() -> None:
    """w = d * n + m."""
    n, d = integers(0, 15, NUM_OUTPUTS, IN_SIZE), halves(NUM_OUTPUTS, IN_SIZE // 32)
    m = -8 * halves(NUM_OUTPUTS, IN_SIZE // 32, seed=2)
    weight = QuantizedWeight(format=form(4, 32), values=(n - 8).to(torch.int8), scales=d, offsets=m + 8 * d)
    assert_same(weight, widen(d, 32).double() * n + widen(m, 32).double())


def test_gguf_q4_k() -> None:
    """w = (d * s) * n - e * t: d and e for 256, s and t of 6 bits for 32."""
    n, groups = integers(0, 15, NUM_OUTPUTS, IN_SIZE), (NUM_OUTPUTS, IN_SIZE // 32)
    s, t = integers(1, 63, *groups), integers(0, 63, *groups).flip(0)
    d, e = (widen(halves(NUM_OUTPUTS, IN_SIZE // 256, seed=seed), 8) / 32 for seed in (3, 4))
    weight = QuantizedWeight(format=form(4, 32), values=(n - 8).to(torch.int8), scales=d * s, offsets=8 * d * s - e * t)
    assert_same(weight, widen(d * s, 32).double() * n - widen(e * t, 32).double())


def test_gguf_q6_k() -> None:
    """w = (d * s) * (n - 32): d for 256, s of 8 bits for 16. Two weights, one zero wherever the other is not."""
    n, s = integers(0, 63, NUM_OUTPUTS, IN_SIZE), integers(-128, 127, NUM_OUTPUTS, IN_SIZE // 16)
    d = widen(halves(NUM_OUTPUTS, IN_SIZE // 256), 16) / 32
    expected = widen(d * s, 16).double() * (n - 32)
    is_odd = (torch.arange(IN_SIZE) // 16 % 2).bool()
    parts = []
    for half in range(2):
        here = is_odd == bool(half)
        values = torch.where(here, n - 32, 0).to(torch.int8)
        parts.append(QuantizedWeight(format=form(8, 32), values=values, scales=(d * s)[:, half::2].contiguous()))
        assert_same(parts[-1], torch.where(here, expected, 0.0))
    assert torch.equal((parts[0].dequantized() + parts[1].dequantized()).double(), expected)


def test_gguf_q8_0() -> None:
    """w = d * q, q of 8 bits, -128 among them."""
    q, d = integers(-128, 127, NUM_OUTPUTS, IN_SIZE), halves(NUM_OUTPUTS, IN_SIZE // 32)
    assert q.min() == -128
    assert_same(QuantizedWeight(format=form(8, 32), values=q.to(torch.int8), scales=d), widen(d, 32).double() * q)
