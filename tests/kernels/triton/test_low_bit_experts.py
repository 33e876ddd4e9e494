"""Experts with weights of few bits, all in two launches: what they are one by one, whatever rows each of them has.

Legend: T = tokens, D = hidden size, R = pairs of a token and an expert.
"""

from collections.abc import Sequence

import pytest
import torch
from tests.breadth import each, pick
from tests.fakes.queued_device import NotCapturableError, RecordedQueue
from tests.kernels.triton.device import DEVICE

from octavo.kernels.quantization import QUANTIZATIONS, LowBitWeight, WeightFormat
from octavo.kernels.quantize import quantize, quantized_linear
from octavo.kernels.reference import Kernels
from octavo.kernels.triton import matmul
from octavo.kernels.triton.kernels import TritonKernels
from octavo.kernels.types import SILU, LinearRole, PackedExperts, PackedLinear

SIZE, NUM_TOKENS = 84, 20  # D, T
ALIKE, SHARED = [37] * 5, [128, 37, 37, 150]
EVEN = [128] * 3  # nothing is padded
# Of five experts one has 36 rows (or 18: more than a tile), one has 5, one has one, and two have none.
EXPERT_IDS = [0, 3, 0, 1, 3, 3, 0, 3, 0, 0, 3] + [0] * pick(13, 31)
integers = pytest.mark.parametrize("name", pick(["int4"], ["int8", "int4"]))
every_name = pytest.mark.parametrize("name", list(QUANTIZATIONS))
every_size = each("sizes", pick([SHARED], [ALIKE, SHARED, EVEN]))


class InOneForm(TritonKernels):
    """Kernels that bring every weight they pack into one form."""

    def __init__(self, name: str, *, deterministic: bool) -> None:
        self._form = QUANTIZATIONS[name].linear
        super().__init__({self._form}, deterministic=deterministic)

    def pack_linear(
        self,
        weight: torch.Tensor | LowBitWeight,
        bias: torch.Tensor | None,
        role: LinearRole = "plain",
        form: WeightFormat | None = None,
    ) -> PackedLinear:
        return super().pack_linear(weight, bias, role, self._form)


class OneByOne(InOneForm):
    """What an expert computed alone is: linears, with an activation between."""

    expert_rows = Kernels.expert_rows


class Quantized(Kernels):
    """Linears as they are defined; the gate is Triton's: another last bit there is another integer here and there."""

    activate = staticmethod(TritonKernels.activate)

    def __init__(self, name: str) -> None:
        self._form = QUANTIZATIONS[name].linear

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return quantized_linear(x, quantize(packed.weight, self._form), packed.bias).to(x.dtype)


def kernels_of(name: str, *, deterministic: bool = False) -> TritonKernels:
    return InOneForm(name, deterministic=deterministic)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def packed_by(kernels: Kernels, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> PackedExperts:
    """Pack experts, with biases if they are not alike."""
    gate_up = [random(2 * size, SIZE, seed=number) * SIZE**-0.5 for number, size in enumerate(sizes)]
    down = [random(SIZE, size, seed=number) * size**-0.5 for number, size in enumerate(sizes)]

    def bias_of(weight: torch.Tensor) -> torch.Tensor | None:
        return weight[:, 0].to(dtype).contiguous() if len(set(sizes)) > 1 else None

    return kernels.pack_experts(
        [kernels.pack_linear(weight, bias_of(weight), "gated") for weight in gate_up],
        [kernels.pack_linear(weight, bias_of(weight)) for weight in down],
    )


def pairs_of(sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token_ids [R], expert_ids [R])."""
    expert_ids = torch.tensor(EXPERT_IDS, device=DEVICE) % len(sizes)
    return torch.arange(len(EXPERT_IDS), device=DEVICE) * 7 % NUM_TOKENS, expert_ids


@integers
@every_size
@each("dtype", pick([torch.bfloat16], [torch.bfloat16, torch.float32]))
def test_integers_have_the_bits_of_experts_computed_alone(name: str, sizes: list[int], dtype: torch.dtype) -> None:
    kernels, one_by_one = kernels_of(name), OneByOne(name, deterministic=False)
    experts, x = packed_by(kernels, sizes, dtype), random(NUM_TOKENS, SIZE, dtype=dtype)
    found = kernels.expert_rows(x, *pairs_of(sizes), experts, SILU)
    assert found.dtype == dtype
    assert torch.equal(found, one_by_one.expert_rows(x, *pairs_of(sizes), experts, SILU))


@every_name
@every_size
def test_answers_are_the_reference_s(name: str, sizes: list[int]) -> None:
    x, reference, kernels = random(NUM_TOKENS, SIZE), Quantized(name), kernels_of(name)
    expected = reference.expert_rows(x, *pairs_of(sizes), packed_by(reference, sizes), SILU)
    found = kernels.expert_rows(x, *pairs_of(sizes), packed_by(kernels, sizes), SILU)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", pick(["int4"], list(QUANTIZATIONS)))
def test_one_wrong_weight_is_noticed(name: str) -> None:
    """The tolerance above is finer than one step of one weight of one expert."""
    kernels, x = kernels_of(name), random(NUM_TOKENS, SIZE)
    token_ids, expert_ids = pairs_of(ALIKE)
    experts = packed_by(kernels, ALIKE)
    right = kernels.expert_rows(x, token_ids, expert_ids, experts, SILU)
    experts.down[3].weight[0, 5, 11] ^= 1
    wrong = kernels.expert_rows(x, token_ids, expert_ids, experts, SILU)
    differs = ~torch.isclose(wrong, right, rtol=1e-4, atol=1e-4)
    rows, columns = differs.nonzero().T.tolist()
    assert set(columns) == {5}
    assert set(expert_ids[rows].tolist()) == {3}


@pytest.mark.parametrize("name", pick(["int4"], ["int8", "int4", "fp8"]))
def test_a_row_has_its_bits_in_any_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats with one tiling; integers with whichever computes them."""
    kernels, x = kernels_of(name, deterministic=True), random(NUM_TOKENS, SIZE, dtype=torch.bfloat16)
    experts, (token_ids, expert_ids) = packed_by(kernels, SHARED, torch.bfloat16), pairs_of(SHARED)
    whole = kernels.expert_rows(x, token_ids, expert_ids, experts, SILU)
    for part in pick((slice(3, 9),), (slice(0, 1), slice(3, 9), slice(40, 41))):
        assert torch.equal(kernels.expert_rows(x, token_ids[part], expert_ids[part], experts, SILU), whole[part])
    assert torch.equal(kernels.expert_rows(x, token_ids.flip(0), expert_ids.flip(0), experts, SILU).flip(0), whole)
    for few, max_some in ((0, 256), (0, 0)):
        monkeypatch.setattr(matmul, "_MAX_FEW", few)
        monkeypatch.setattr(matmul, "_MAX_SOME", max_some)
        assert torch.equal(kernels.expert_rows(x, token_ids, expert_ids, experts, SILU), whole)


@pytest.mark.parametrize("name", pick(["int4"], list(QUANTIZATIONS)))
def test_nothing_waits_for_the_device(name: str) -> None:
    """A capture refuses to read values. One by one, the host asks for numbers of rows."""
    kernels, one_by_one = kernels_of(name), OneByOne(name, deterministic=False)
    experts, x = packed_by(kernels, ALIKE), random(NUM_TOKENS, SIZE)
    token_ids, expert_ids = (ids[:4] for ids in pairs_of(ALIKE))
    assert kernels.captures_experts

    def compute(with_kernels: TritonKernels) -> None:
        with_kernels.expert_rows(x, token_ids, expert_ids, experts, SILU)

    RecordedQueue().capture(lambda: compute(kernels))
    with pytest.raises(NotCapturableError):
        RecordedQueue().capture(lambda: compute(one_by_one))


@pytest.mark.parametrize("name", pick(["int4"], list(QUANTIZATIONS)))
def test_rows_that_are_not_finite_stay_in_their_row(name: str) -> None:
    sizes = pick(ALIKE, SHARED)
    kernels, x, (token_ids, expert_ids) = kernels_of(name), random(NUM_TOKENS, SIZE), pairs_of(sizes)
    experts = packed_by(kernels, sizes)
    expected = kernels.expert_rows(x, token_ids, expert_ids, experts, SILU)
    x[7, 5] = float("nan")
    found, is_bad = kernels.expert_rows(x, token_ids, expert_ids, experts, SILU), token_ids == 7
    assert is_bad.any()
    assert found[is_bad].isnan().all()
    assert torch.equal(found[~is_bad], expected[~is_bad])


@every_name
def test_no_rows_are_no_rows(name: str) -> None:
    kernels, nothing = kernels_of(name), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert kernels.expert_rows(random(3, SIZE), nothing, nothing, packed_by(kernels, ALIKE), SILU).shape == (0, SIZE)
