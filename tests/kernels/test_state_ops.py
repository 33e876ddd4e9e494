"""Short convolutions and Mamba-2: C++ against the reference; bits do not depend on how steps divide a request."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.kernels.conftest import native
from tests.kernels.levels import LEVEL_DTYPES
from tests.kernels.test_gated_delta import MAX_DRAFTS, NUM_SLOTS, NUM_TOKENS, TOLERANCES, step_of

from octavo.kernels.reference import Kernels
from octavo.kernels.short_conv import ShortConvWeights
from octavo.kernels.state_space import GroupNorm, StateSpaceWeights
from octavo.kernels.states import StateStep, StateTensors


@dataclass(frozen=True, kw_only=True)
class Op(ABC):
    """One layer, and its inputs for the tokens of a request."""

    weights: Any
    rows: torch.Tensor

    @abstractmethod
    def run(self, kernels: Kernels, rows: torch.Tensor, states: StateTensors, step: StateStep) -> torch.Tensor: ...

    @abstractmethod
    def states(self) -> StateTensors:
        """Return states that hold rubbish."""


class Convolution(Op):
    @classmethod
    def random(cls, dtype: torch.dtype, seed: int) -> "Convolution":
        draw = torch.Generator().manual_seed(seed)
        num_channels, conv_size = 275, 4  # more than are computed at once
        weights = ShortConvWeights(
            conv=torch.randn(conv_size, num_channels, generator=draw), bias=torch.randn(num_channels, generator=draw)
        )
        return cls(weights=weights, rows=torch.randn(NUM_TOKENS, 3 * num_channels, generator=draw).to(dtype))

    def run(self, kernels: Kernels, rows: torch.Tensor, states: StateTensors, step: StateStep) -> torch.Tensor:
        return kernels.short_conv(self.weights, rows, states, step)

    def states(self) -> StateTensors:
        past, channels = len(self.weights.conv) - 1, self.weights.conv.shape[1]
        conv, log = (
            torch.full((*of, channels), 1e4, dtype=self.rows.dtype) for of in ((NUM_SLOTS, past), (3, MAX_DRAFTS))
        )
        return StateTensors(conv, log=log)


class Space(Op):
    @classmethod
    def random(cls, dtype: torch.dtype, seed: int, **changes: Any) -> "Space":
        draw = torch.Generator().manual_seed(seed)
        # Groups, heads, key size, value size, tokens of the convolution: odd, more heads than are computed at once.
        num_groups, num_heads, key_size, value_size, conv_size = 2, 20, 10, 19, 4
        channels = num_heads * value_size + 2 * num_groups * key_size
        weights = StateSpaceWeights(
            num_groups=num_groups,
            num_heads=num_heads,
            key_size=key_size,
            value_size=value_size,
            conv=torch.randn(conv_size, channels, generator=draw),
            conv_bias=torch.randn(channels, generator=draw),
            decay_rates=torch.rand(num_heads, generator=draw),
            dt_bias=torch.randn(num_heads, generator=draw),
            skip=torch.randn(num_heads, generator=draw),
        )
        rows = torch.randn(NUM_TOKENS, weights.width + channels + num_heads, generator=draw)
        rows[5, -num_heads:] = 30.0  # where softplus is the number itself
        return cls(weights=replace(weights, **changes), rows=rows.to(dtype))

    def run(self, kernels: Kernels, rows: torch.Tensor, states: StateTensors, step: StateStep) -> torch.Tensor:
        return kernels.state_space(self.weights, rows, states, step)

    def states(self) -> StateTensors:
        weights, dtype = self.weights, self.rows.dtype
        past, channels = len(weights.conv) - 1, weights.num_channels
        matrix = (NUM_SLOTS, weights.num_heads, weights.key_size, weights.value_size)
        return StateTensors(
            torch.full((NUM_SLOTS, past, channels), 1e4, dtype=dtype),
            torch.full(matrix, 1e4),
            torch.full((3, MAX_DRAFTS, channels + weights.num_heads), 1e4, dtype=dtype),
        )


OPS = [Convolution, Space]


def in_steps(kernels: Kernels, op: Op, sizes: list[int]) -> tuple[torch.Tensor, StateTensors]:
    """Compute steps of these numbers of tokens; each begins where the last one left its state."""
    states, outs, begin, start = op.states(), [], -1, 0
    for at, size in enumerate(sizes):
        slot = at % NUM_SLOTS
        step = step_of([begin], [[-1] * (size - 1) + [slot]])
        outs.append(op.run(kernels, op.rows[start : start + size], states, step))
        begin, start = slot, start + size
    return torch.cat(outs), StateTensors(*(pool[begin] for pool in states.pools))


def check_same(found: StateTensors, expected: StateTensors) -> None:
    assert torch.equal(found.conv, expected.conv)
    assert torch.equal(found.matrix, expected.matrix)


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_as_the_reference(kind: Any, level: str, dtype: torch.dtype) -> None:
    op = kind.random(dtype, seed=1)
    (expected, state), (found, its_state) = (
        in_steps(kernels, op, [17, 1, 1, 22]) for kernels in (Kernels(), native(level, 2, dtype))
    )
    torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    torch.testing.assert_close(its_state.matrix, state.matrix, atol=2e-5, rtol=2e-5)
    assert torch.equal(its_state.conv, state.conv)


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
def test_bounds_of_steps(level: str, dtype: torch.dtype) -> None:
    """And a result without gates, a convolution without a bias."""
    op = Space.random(dtype, seed=1, dt_limit=(0.3, 0.9), applies_gates=False, conv_bias=None)
    [expected, _], [found, _] = (in_steps(kernels, op, [17, 1, 23]) for kernels in (Kernels(), native(level, 2, dtype)))
    torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_bits_do_not_depend_on_steps(kind: Any, level: str, dtype: torch.dtype) -> None:
    op, kernels = kind.random(dtype, seed=2), native(level, 2, dtype)
    whole, state = in_steps(kernels, op, [NUM_TOKENS])
    for sizes in ([1] * NUM_TOKENS, [16, 16, 9], [1, 2, 3, 4, 31], [40, 1]):
        found, its_state = in_steps(native(level, 1, dtype), op, sizes)
        assert torch.equal(found, whole), sizes
        check_same(its_state, state)


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_bits_do_not_depend_on_snapshots_and_neighbors(kind: Any, level: str, dtype: torch.dtype) -> None:
    """Two requests, one in place, with snapshots inside the step; then one goes on from each."""
    kernels, one, other = native(level, 2, dtype), kind.random(dtype, seed=3), kind.random(dtype, seed=4)
    whole, _ = in_steps(kernels, one, [NUM_TOKENS])
    states = one.states()

    def run(begins: list[int], slots: list[list[int]], parts: list[slice]) -> torch.Tensor:
        rows = [of.rows[part] for of, part in zip((one, other), parts, strict=False)]
        out: torch.Tensor = one.run(kernels, torch.cat(rows), states, step_of(begins, slots))
        return out

    run([-1, -1], [[2], [-1, -1, 3]], [slice(0, 1), slice(0, 3)])
    found = run([2, 3], [[2, -1, -1, 5, -1, -1, -1, 6], [4]], [slice(1, 9), slice(3, 4)])
    assert torch.equal(found[:8], whole[1:9])
    assert torch.equal(run([2], [[7] * 10], [slice(2, 12)]), whole[2:12])
    assert torch.equal(run([5], [[-1] * 20], [slice(5, 25)]), whole[5:25])
    assert torch.equal(run([6], [[-1] * 32], [slice(9, NUM_TOKENS)]), whole[9:])


@pytest.mark.parametrize("kernels", ["reference", *LEVEL_DTYPES], ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_drafts_leave_nothing_behind(kind: Any, kernels: str | tuple[str, torch.dtype]) -> None:
    """Two requests with drafts, of which some are accepted: those are computed again, the others leave no trace."""
    level, dtype = ("reference", torch.float32) if isinstance(kernels, str) else kernels
    ops = Kernels() if level == "reference" else native(level, 2, dtype)
    one, wrong = kind.random(dtype, seed=5), kind.random(dtype, seed=6)
    whole, state = in_steps(ops, one, [NUM_TOKENS])
    states, done, replayed, begin, outs = one.states(), 0, 0, -1, list[torch.Tensor]()
    for right, drafts in [(0, 2), (3, 4), (4, 4), (2, 3), (0, 0), (1, 1), (0, 0), (0, 3), (4, 4), (4, 4)] * 2:
        num_drafts = min(drafts, NUM_TOKENS - 1 - done)
        num_right = min(right, num_drafts)
        is_right = torch.arange(1 + num_drafts)[:, None] <= num_right
        part = slice(done, done + 1 + num_drafts)
        rows = torch.where(is_right, one.rows[part], wrong.rows[part])
        # A neighbor that begins, and drafts nothing.
        step = step_of([begin, -1], [[0] + [-1] * num_drafts, [8]], [(replayed, num_drafts), (0, 0)])
        outs.append(one.run(ops, torch.cat((rows, wrong.rows[:1])), states, step)[: 1 + num_right])
        done, replayed, begin = done + 1 + num_right, num_right, 0
        if done == NUM_TOKENS:
            break
    assert done == NUM_TOKENS
    is_same = torch.equal if level != "reference" else lambda a, b: torch.allclose(a, b, atol=1e-5)
    assert is_same(torch.cat(outs), whole)
    if not replayed:
        assert is_same(states.conv[0], state.conv)


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
@pytest.mark.parametrize("has_gates", [False, True])
def test_norm_of_groups(level: str, dtype: torch.dtype, has_gates: bool) -> None:
    """At once; and in parts that begin and end inside groups, whose sums are added up."""
    draw, kernels = torch.Generator().manual_seed(7), native(level, 2, dtype)
    x, longer = (torch.randn(5, size, generator=draw).to(dtype) for size in (111, 150))
    gates = longer[:, 13:124] if has_gates else None
    norm = GroupNorm(weight=torch.rand(111, generator=draw) + 0.5, eps=1e-5, group_size=37, num_groups=3)
    expected = Kernels().norm_groups(x, norm, gates, None)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(kernels.norm_groups(x, norm, gates, None), expected, atol=tolerance, rtol=tolerance)
    for ops in (kernels, Kernels()):
        columns = slice(0, 50), slice(50, 111)
        norms = [replace(norm, weight=norm.weight[part], first=part.start) for part in columns]
        parts = [x[:, part].contiguous() for part in columns]
        sums = sum(ops.group_sums(part, of) for part, of in zip(parts, norms, strict=True))
        assert isinstance(sums, torch.Tensor)
        found = [
            ops.norm_groups(part, of, None if gates is None else gates[:, at], sums)
            for part, of, at in zip(parts, norms, columns, strict=True)
        ]
        torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=tolerance, rtol=tolerance)
