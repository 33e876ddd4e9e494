"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its long-context scalings.

Legend: T = tokens, P = positions in the table, D = rotated elements of a head.
"""

import math
from dataclasses import replace

import torch
from torch import nn

from octavo.config.hf_layers import yarn_attention_factor
from octavo.config.layers import RopeConfig


class RotaryEmbedding(nn.Module):
    """cos and sin of every position, computed once.

    A table, because torch computes the ends of an array with other instructions than its middle: computed per step, the
    last bit could depend on the batch. Angles are float32, as in training; cos and sin are computed in float64, so that
    rounding them to float32 gives the same bits for any number of threads.
    """

    def __init__(self, rope: RopeConfig, rotary_dim: int, num_positions: int, *, device: torch.device) -> None:
        super().__init__()
        has_two = bool(rope.long_divisors) and num_positions > (rope.original_max_position or 0)
        of_long = replace(rope, divisors=rope.long_divisors) if has_two else rope
        # A model on the meta device computes no table.
        with torch.device("meta" if device.type == "meta" else "cpu"):
            frequencies, attention_factor = inverse_frequencies(of_long, rotary_dim)
            positions = torch.arange(num_positions, dtype=torch.float32)
            angles = torch.outer(positions, frequencies).double()  # [P, D / 2]
            if has_two:  # behind all others: rows of requests that stay within the first range of LongRoPE
                short = torch.outer(positions[: rope.original_max_position], inverse_frequencies(rope, rotary_dim)[0])
                angles = torch.cat([angles, short.double()])
        self._sections, self._is_interleaved = list(rope.sections), rope.is_interleaved
        factor: float | torch.Tensor = attention_factor  # [P, 1], if it grows
        if (growth := rope.growth) is not None:
            intervals = torch.div(positions + growth.offset, growth.interval, rounding_mode="floor")
            factor = (attention_factor * (1.0 + growth.rate * torch.log1p(intervals))).unsqueeze(1)
        self._cos = (angles.cos().float() * factor).to(device)  # [P, D / 2]
        self._sin = (angles.sin().float() * factor).to(device)  # [P, D / 2]

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each [T, D / 2] float32, of positions [T], or [3, T] if the model has sections."""
        if positions.dim() > 1:
            return self._of_sections(self._cos, positions), self._of_sections(self._sin, positions)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _of_sections(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return [T, D / 2]: each section of columns is looked up with its own row of `positions` [3, T].

        Interleaved, columns 1, 4, 7, ... are those of height, 2, 5, 8, ... those of width, all others those of time.
        """
        if self._is_interleaved:
            rows = table.index_select(0, positions[0])
            for axis, size in enumerate(self._sections[1:], start=1):
                columns = slice(axis, 3 * size, 3)
                rows[:, columns] = table[:, columns].index_select(0, positions[axis])
            return rows
        parts = zip(torch.split(table, self._sections, dim=1), positions, strict=True)
        return torch.cat([part.index_select(0, of_axis) for part, of_axis in parts], dim=1)


def peak_table_bytes(rotary_dim: int, num_positions: int) -> int:
    """Return the memory that computing a table takes: angles and one function of them in float64, three in float32."""
    return num_positions * rotary_dim // 2 * (2 * 8 + 3 * 4)


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> tuple[torch.Tensor, float]:
    """Return radians per position [D / 2] (float32) and the factor on cos and sin.

    "dynamic" is the plain embedding: it is served up to its original length only.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim  # [D / 2]
    periods = rope.theta**exponents  # [D / 2], positions per radian
    if rope.kind == "linear":
        return 1.0 / periods / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / periods), 1.0
    if rope.kind == "yarn":
        given = rope.attention_factor
        own = yarn_attention_factor(rope.factor, rope.mscale, rope.mscale_all_dim)
        return _yarn(rope, periods, rotary_dim), own if given is None else given
    if rope.divisors:
        return 1.0 / (periods * torch.tensor(rope.divisors, dtype=torch.float32)), rope.attention_factor or 1.0
    return 1.0 / periods, 1.0


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow long wavelengths down by `factor`, keep short ones, blend in between (Llama 3.1 model card)."""
    assert rope.original_max_position is not None
    waves_in_context = rope.original_max_position * frequencies / (2 * math.pi)  # [D / 2]
    blend = (waves_in_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)  # 0: slowed, 1: kept
    return (1.0 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeConfig, periods: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """YaRN's "NTK by parts" (Peng et al. 2023, arXiv:2309.00071, section 3.2): blend by dimension index."""
    original = rope.original_max_position
    assert original is not None

    def index_of(num_rotations: float) -> float:
        return rotary_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)  # the indices between which to blend
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    high = low + 0.001 if low == high else high
    indices = torch.arange(rotary_dim // 2, dtype=torch.float32)  # [D / 2]
    slowed = ((indices - low) / (high - low)).clamp(0.0, 1.0)  # [D / 2], 0: kept, 1: slowed
    return slowed / (rope.factor * periods) + (1.0 - slowed) / periods
