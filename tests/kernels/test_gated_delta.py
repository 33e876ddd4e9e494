"""Linear attention: C++ against the reference; bits do not depend on how a request is divided into steps."""

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from tests.breadth import pick
from tests.kernels.conftest import native
from tests.kernels.levels import LEVEL_DTYPES

from octavo.kernels.gated_delta import GatedDeltaWeights
from octavo.kernels.reference import Kernels
from octavo.kernels.states import StateStep, StateTensors

NUM_TOKENS, NUM_SLOTS, MAX_DRAFTS = 41, 9, 4
# Key heads, value heads, key size, value size, tokens of the convolution: odd, and as published models have them.
SHAPES = pick([(2, 6, 10, 7, 4), (1, 1, 128, 128, 4)], [(2, 6, 10, 7, 4), (1, 1, 128, 128, 4), (3, 3, 32, 52, 2)])
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """The inputs of one layer for the tokens of a request."""

    weights: GatedDeltaWeights
    rows: torch.Tensor
    gates: torch.Tensor

    @classmethod
    def random(cls, shape: tuple[int, int, int, int, int], dtype: torch.dtype, seed: int) -> "Sequence":
        num_key_heads, num_value_heads, key_size, value_size, conv_size = shape
        draw = torch.Generator().manual_seed(seed)
        values = num_value_heads * value_size
        channels = 2 * num_key_heads * key_size + values
        weights = GatedDeltaWeights(
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_size=key_size,
            value_size=value_size,
            conv=torch.randn(conv_size, channels, generator=draw),
            decay_rates=torch.rand(num_value_heads, generator=draw),
            dt_bias=torch.randn(num_value_heads, generator=draw),
            norm=torch.rand(value_size, generator=draw) + 0.5,
            eps=1e-6,
        )
        rows = torch.randn(NUM_TOKENS, channels + values, generator=draw).to(dtype)
        gates = 3.0 * torch.randn(NUM_TOKENS, 2 * num_value_heads, generator=draw)
        gates[5] = 30.0  # where softplus is the number itself
        return cls(weights=weights, rows=rows, gates=gates.to(dtype))

    def states(self) -> StateTensors:
        """Return states that hold rubbish."""
        weights, dtype = self.weights, self.rows.dtype
        past, channels = len(weights.conv) - 1, weights.num_channels
        matrix = (NUM_SLOTS, weights.num_value_heads, weights.key_size, weights.value_size)
        log = (3, MAX_DRAFTS, channels + self.gates.shape[1])
        return StateTensors(
            torch.full((NUM_SLOTS, past, channels), 1e4, dtype=dtype),
            torch.full(matrix, 1e4),
            torch.full(log, 1e4, dtype=dtype),
        )


def step_of(begins: list[int], slots: list[list[int]], drafts: list[tuple[int, int]] | None = None) -> StateStep:
    """Return a step of some requests; `drafts` are the replayed tokens and the new drafts of each."""
    starts = [0, *accumulate(map(len, slots))]
    replayed, drafted = (None, None) if drafts is None else torch.tensor(drafts, dtype=torch.int32).T.contiguous()
    return StateStep(
        kv_group=1,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        query_start_loc_list=starts,
        slots=torch.tensor([slot for each in slots for slot in each]),
        begins=torch.tensor(begins),
        num_replayed=replayed,
        num_drafts=drafted,
        rows=None if drafts is None else torch.arange(len(begins)) + 1,
    )


def in_steps(kernels: Kernels, sequence: Sequence, sizes: list[int]) -> tuple[torch.Tensor, StateTensors]:
    """Compute steps of these numbers of tokens; each begins where the last one left its state."""
    states, outs, begin, start = sequence.states(), [], -1, 0
    for at, size in enumerate(sizes):
        slot, part = at % NUM_SLOTS, slice(start, start + size)
        step = step_of([begin], [[-1] * (size - 1) + [slot]])
        outs.append(kernels.gated_delta_net(sequence.weights, sequence.rows[part], sequence.gates[part], states, step))
        begin, start = slot, start + size
    last = StateTensors(states.conv[begin], states.matrix[begin])
    return torch.cat(outs), last


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_the_reference(shape: tuple[int, int, int, int, int], level: str, dtype: torch.dtype) -> None:
    sequence = Sequence.random(shape, dtype, seed=1)
    (expected, state), (found, its_state) = (
        in_steps(kernels, sequence, [17, 1, 1, 22]) for kernels in (Kernels(), native(level, 2, dtype))
    )
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(its_state.matrix, state.matrix, atol=2e-5, rtol=2e-5)
    assert torch.equal(its_state.conv, state.conv)


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_steps(shape: tuple[int, int, int, int, int], level: str, dtype: torch.dtype) -> None:
    sequence, kernels = Sequence.random(shape, dtype, seed=2), native(level, 2, dtype)
    whole, state = in_steps(kernels, sequence, [NUM_TOKENS])
    for sizes in ([1] * NUM_TOKENS, [16, 16, 9], [1, 2, 3, 4, 31], [40, 1]):
        found, its_state = in_steps(kernels, sequence, sizes)
        assert torch.equal(found, whole), sizes
        assert torch.equal(its_state.matrix, state.matrix)
        assert torch.equal(its_state.conv, state.conv)


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
def test_bits_do_not_depend_on_snapshots_and_neighbors(level: str, dtype: torch.dtype) -> None:
    """Two requests, one in place, with snapshots inside the step; then one goes on from each."""
    kernels = native(level, 2, dtype)
    one, other = (Sequence.random(SHAPES[0], dtype, seed) for seed in (3, 4))
    other = Sequence(weights=one.weights, rows=other.rows, gates=other.gates)
    whole, _ = in_steps(kernels, one, [NUM_TOKENS])
    states = one.states()

    def run(begins: list[int], slots: list[list[int]], parts: list[slice]) -> torch.Tensor:
        sources = (one, other)[: len(parts)]
        rows, gates = (
            torch.cat([getattr(of, kind)[part] for of, part in zip(sources, parts, strict=True)])
            for kind in ("rows", "gates")
        )
        return kernels.gated_delta_net(one.weights, rows, gates, states, step_of(begins, slots))

    run([-1, -1], [[2], [-1, -1, 3]], [slice(0, 1), slice(0, 3)])
    found = run([2, 3], [[2, -1, -1, 5, -1, -1, -1, 6], [4]], [slice(1, 9), slice(3, 4)])
    assert torch.equal(found[:8], whole[1:9])
    assert torch.equal(run([2], [[7] * 10], [slice(2, 12)]), whole[2:12])
    assert torch.equal(run([5], [[-1] * 20], [slice(5, 25)]), whole[5:25])
    assert torch.equal(run([6], [[-1] * 32], [slice(9, NUM_TOKENS)]), whole[9:])


@pytest.mark.parametrize("kernels", ["reference", *LEVEL_DTYPES], ids=str)
def test_drafts_leave_nothing_behind(kernels: str | tuple[str, torch.dtype]) -> None:
    """Two requests with drafts, of which some are accepted: those are computed again, the others leave no trace."""
    level, dtype = ("reference", torch.float32) if isinstance(kernels, str) else kernels
    ops = Kernels() if level == "reference" else native(level, 2, dtype)
    one = Sequence.random(SHAPES[0], dtype, seed=5)
    whole, state = in_steps(ops, one, [NUM_TOKENS])
    states, wrong = one.states(), Sequence.random(SHAPES[0], dtype, seed=6)
    done, replayed, begin, outs = 0, 0, -1, list[torch.Tensor]()
    for right, drafts in [(0, 2), (3, 4), (4, 4), (2, 3), (0, 0), (1, 1), (0, 0), (0, 3), (4, 4), (4, 4)] * 2:
        num_drafts = min(drafts, NUM_TOKENS - 1 - done)
        num_right = min(right, num_drafts)
        is_right = torch.arange(1 + num_drafts)[:, None] <= num_right
        part = slice(done, done + 1 + num_drafts)
        rows, gates = (
            torch.where(is_right, ours[part], other[part])
            for ours, other in ((one.rows, wrong.rows), (one.gates, wrong.gates))
        )
        slots = [0] + [-1] * num_drafts
        # A neighbor that begins, and drafts nothing.
        step = step_of([begin, -1], [slots, [8]], [(replayed, num_drafts), (0, 0)])
        both = torch.cat((rows, wrong.rows[:1])), torch.cat((gates, wrong.gates[:1]))
        outs.append(ops.gated_delta_net(one.weights, *both, states, step)[: 1 + num_right])
        done, replayed, begin = done + 1 + num_right, num_right, 0
        if done == NUM_TOKENS:
            break
    assert done == NUM_TOKENS
    is_same = torch.equal if level != "reference" else lambda a, b: torch.allclose(a, b, atol=1e-5)
    assert is_same(torch.cat(outs), whole)
    if not replayed:
        assert is_same(states.matrix[0], state.matrix)


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
def test_a_gate_of_longer_rows(level: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(7)
    x, longer = (torch.randn(5, size, generator=draw).to(dtype) * 20 for size in (37, 100))
    expected, found = (kernels.gate(x, longer[:, 63:]) for kernels in (Kernels(), native(level, 2, dtype)))
    torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
