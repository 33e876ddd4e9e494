"""Reads Mamba-2's numbers from `config.json`, whose keys have other names in each family."""

import math
from typing import Any, Literal

from octavo.config.json_fields import JsonFields
from octavo.config.layers import Mamba2Spec

MAMBA_KINDS = frozenset({"mamba", "linear_attention"})  # the second is transformers 5's name for the first
ATTENTION_KINDS = frozenset({"attention", "full_attention"})


def read_mamba2(
    fields: JsonFields,
    *,
    heads: str,
    head_dim: int,
    groups: tuple[str, int],
    state: tuple[str, int],
    conv: tuple[str, int],
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate",
    has_bias: bool = False,
    has_out_bias: bool | None = None,
    has_conv_bias: bool = True,
) -> Mamba2Spec:
    """Return the spec; names are those of keys, with their defaults, and `head_dim` the elements of a head's values."""
    num_heads, num_groups = fields.integer(heads), fields.integer(*groups)
    if num_heads % num_groups:
        raise fields.fail(heads, f"a multiple of {groups[0]} ({num_groups}) is expected")
    conv_size = fields.integer(*conv, minimum=2)
    if conv_size > 9:
        raise fields.unsupported(conv[0], "; 2 to 9 are")
    return Mamba2Spec(
        num_groups=num_groups,
        num_heads=num_heads,
        state_size=fields.integer(*state),
        head_dim=head_dim,
        conv_size=conv_size,
        has_bias=has_bias,
        has_out_bias=has_bias if has_out_bias is None else has_out_bias,
        has_conv_bias=has_conv_bias,
        dt_limit=read_dt_limit(fields),
        norm=norm,
    )


def read_dt_limit(fields: JsonFields) -> tuple[float, float]:
    """Return the bounds of steps. JSON has no infinity: files have Python's literal, or transformers' object."""
    key = "time_step_limit"
    value = fields.values.get(key, [0.0, math.inf])
    bounds = [_number(bound) for bound in value] if isinstance(value, list) else []
    if len(bounds) != 2 or None in bounds:
        raise fields.fail(key, "two numbers are expected, the second may be Infinity")
    least, most = bounds
    assert least is not None, "checked above"
    assert most is not None, "checked above"
    if not 0 <= least <= most:
        raise fields.fail(key, "a bound of at least 0, then one that is not below it, are expected")
    return least, most


def _number(value: Any) -> float | None:
    if isinstance(value, dict):
        value = math.inf if value == {"__float__": "Infinity"} else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return float(value) if is_number else None
