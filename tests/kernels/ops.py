"""Each op as a case: how to call it with made-up arguments of a given number of rows, in odd sizes.

Legend: T = tokens (rows), K = input size, N = output size, D = hidden or head size, H = heads, I = intermediate size,
X = experts, C = experts that a token chooses.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from octavo.config.layers import RoutingSpec
from octavo.kernels.reference import Kernels
from octavo.kernels.types import SILU, Activation, Fused, GeluKind, PackedExperts, PackedLinear, PartNorms, Routing

MAX_ROWS = 300
# Limits that values of size 1 to 3 meet.
OTHERS = (
    Activation("gelu_tanh"),
    Activation("relu2"),
    Activation("plain_gelu"),
    Activation("clamped_swiglu", limit=1.25, alpha=1.702),
)
Op = Callable[[Kernels, slice], torch.Tensor]  # computes the rows of the slice


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op with arguments."""

    name: str
    make: Callable[[torch.dtype], Op]


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the same numbers on whatever is torch's default device."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def _fused(residual: torch.Tensor, norm: torch.Tensor, activation: Activation = SILU, offset: float = 0.0) -> Fused:
    return Fused(residual=residual, norm_weight=norm, eps=1e-5, norm_offset=offset, activation=activation)


def _linear(num_outputs: int, in_size: int, *, has_bias: bool) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, weight = _random(MAX_ROWS, in_size, dtype=dtype), _random(num_outputs, in_size, dtype=dtype)
        bias = _random(num_outputs, dtype=dtype) if has_bias else None
        scaled = weight * in_size**-0.5  # results of size 1
        pack = cache(lambda kernels: kernels.pack_linear(scaled, bias))
        return lambda kernels, rows: kernels.linear(x[rows], pack(kernels))

    return make


def _logits_linear(num_outputs: int, in_size: int) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, weight = _random(MAX_ROWS, in_size, dtype=dtype), _random(num_outputs, in_size, dtype=dtype)
        scaled = weight * in_size**-0.5
        # Rounded to the dtype: kernels may round before they widen, or not.
        pack = cache(lambda kernels: kernels.pack_linear(scaled, None))
        return lambda kernels, rows: kernels.logits_linear(x[rows], pack(kernels)).to(dtype)

    return make


def _pack_up(kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> PackedLinear:
    """Pack [2 * I, K] for an activation; one without gates takes the first half."""
    if activation.is_gated:
        return kernels.pack_linear(weight, bias, "gated")
    size = len(weight) // 2
    return kernels.pack_linear(weight[:size], None if bias is None else bias[:size])


def _activated_linear(
    size: int, in_size: int, *, has_bias: bool, activation: Activation = SILU
) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, weight = _random(MAX_ROWS, in_size, dtype=dtype), _random(2 * size, in_size, dtype=dtype)
        bias = _random(2 * size, dtype=dtype) if has_bias else None
        scaled = weight * in_size**-0.5
        pack = cache(lambda kernels: _pack_up(kernels, scaled, bias, activation))
        return lambda kernels, rows: kernels.activated_linear(x[rows], pack(kernels), activation)

    return make


def _normed_linear(num_outputs: int, in_size: int) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, residual = _random(MAX_ROWS, in_size, dtype=dtype), _random(MAX_ROWS, in_size, dtype=dtype).flip(0)
        norm, weight = _random(in_size, dtype=dtype), _random(num_outputs, in_size, dtype=dtype) * in_size**-0.5
        pack = cache(lambda kernels: kernels.pack_linear(weight, None))
        return lambda kernels, rows: torch.cat(
            kernels.normed_linear(x[rows], _fused(residual[rows], norm), pack(kernels)), dim=-1
        )

    return make


def _mlp(
    size: int, middle_size: int, activation: Activation = SILU, offset: float = 0.0
) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, residual = _random(MAX_ROWS, size, dtype=dtype), _random(MAX_ROWS, size, dtype=dtype).flip(0)
        gate_up = _random(2 * middle_size, size, dtype=dtype) * size**-0.5
        down = _random(size, middle_size, dtype=dtype) * middle_size**-0.5
        norm = _random(size, dtype=dtype)
        pack = cache(lambda kernels: (_pack_up(kernels, gate_up, None, activation), kernels.pack_linear(down, None)))

        def compute(kernels: Kernels, rows: slice) -> torch.Tensor:
            fused = _fused(residual[rows], norm, activation, offset)
            return torch.cat(kernels.mlp(x[rows], fused, *pack(kernels)), dim=-1)

        return compute

    return make


def _route(size: int, routing: Routing) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x = _random(MAX_ROWS, size, dtype=dtype)
        weight = _random(routing.num_logits, size, dtype=dtype) * size**-0.5

        corrected = _corrected(routing)

        def compute(kernels: Kernels, rows: slice) -> torch.Tensor:
            routes = kernels.route(x[rows], kernels.pack_linear(weight, None, "router"), corrected)
            return torch.cat((routes.expert_ids.float(), routes.weights), dim=-1)  # [T, 2 * C]

        return compute

    return make


def _experts(
    size: int, middle_sizes: list[int], dtype: torch.dtype, activation: Activation = SILU
) -> Callable[[Kernels], PackedExperts]:
    """Return what packs experts of these sizes, once for each set of kernels; the last may be a shared one.

    Those with the activation of gpt-oss have its biases.
    """
    has_bias = activation.kind == "clamped_swiglu"
    gate_up = [_random(2 * middle + expert, size)[: 2 * middle] for expert, middle in enumerate(middle_sizes)]
    down = [_random(size + expert, middle)[:size] for expert, middle in enumerate(middle_sizes)]
    packed: dict[str, PackedExperts] = {}

    def bias_of(weight: torch.Tensor) -> torch.Tensor | None:
        return weight[:, 0].to(dtype).contiguous() if has_bias else None

    def pack(kernels: Kernels) -> PackedExperts:
        if kernels.name not in packed:
            packed[kernels.name] = kernels.pack_experts(
                [_pack_up(kernels, (weight * size**-0.5).to(dtype), bias_of(weight), activation) for weight in gate_up],
                [kernels.pack_linear((weight * weight.shape[1] ** -0.5).to(dtype), bias_of(weight)) for weight in down],
            )
        return packed[kernels.name]

    return pack


def _expert_rows(size: int, middle_sizes: list[int], activation: Activation = SILU) -> Callable[[torch.dtype], Op]:
    """Rows are tokens in a stride of 7; most of them choose the first experts."""

    def make(dtype: torch.dtype) -> Op:
        x, token_ids = _random(50, size, dtype=dtype), torch.arange(MAX_ROWS) * 7 % 50
        expert_ids = (torch.arange(MAX_ROWS) % 5 * torch.arange(MAX_ROWS) % 3) % len(middle_sizes)
        experts = _experts(size, middle_sizes, dtype, activation)
        return lambda kernels, rows: kernels.expert_rows(
            x, token_ids[rows], expert_ids[rows], experts(kernels), activation
        )

    return make


def _head_linears(num_heads: int, num_outputs: int, in_size: int, rest: int) -> Callable[[torch.dtype], Op]:
    """A linear for each head; the rest of a head stays behind it."""

    def make(dtype: torch.dtype) -> Op:
        x = _random(MAX_ROWS, num_heads * (in_size + rest), dtype=dtype)
        weights = _random(num_heads, num_outputs, in_size, dtype=dtype) * in_size**-0.5
        pack = cache(lambda kernels: kernels.pack_heads([kernels.pack_linear(of, None) for of in weights], in_size))
        return lambda kernels, rows: kernels.head_linears(x[rows], pack(kernels))

    return make


def _combine_experts(size: int, num_choices: int) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        answers, weights = _random(MAX_ROWS, num_choices, size, dtype=dtype), _random(MAX_ROWS, num_choices).sigmoid()
        return lambda kernels, rows: kernels.combine_experts(answers[rows], weights[rows])

    return make


def _moe(
    size: int, middle_sizes: list[int], routing: Routing, activation: Activation = SILU
) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, residual = _random(MAX_ROWS, size, dtype=dtype), _random(MAX_ROWS, size, dtype=dtype).flip(0)
        norm = _random(size, dtype=dtype)
        weight = _random(routing.num_logits, size, dtype=dtype) * size**-0.5
        experts, corrected = _experts(size, middle_sizes, dtype, activation), _corrected(routing)
        bias = weight[:, 0].contiguous() if activation.kind == "clamped_swiglu" else None

        def compute(kernels: Kernels, rows: slice) -> torch.Tensor:
            load, router = (
                torch.ones(routing.num_experts, dtype=torch.int64),
                kernels.pack_linear(weight, bias, "router"),
            )
            out = kernels.moe(
                x[rows], _fused(residual[rows], norm, activation), router, corrected, experts(kernels), load
            )
            assert load.sum() == routing.num_experts + len(x[rows]) * routing.top_k
            return torch.cat(out, dim=-1)

        return compute

    return make


def _routing(
    num_experts: int,
    top_k: int,
    rule: RoutingSpec = RoutingSpec(),  # noqa: B008 - frozen
    *,
    renormalizes: bool,
    has_shared: bool,
) -> Routing:
    return Routing(num_experts=num_experts, top_k=top_k, renormalizes=renormalizes, has_shared=has_shared, rule=rule)


def _corrected(routing: Routing) -> Routing:
    """Return it with a correction, if it has one, by which some scores are negative."""
    return replace(routing, correction=_random(routing.num_experts) - 0.5 if routing.rule.has_correction else None)


def _rms_norm(size: int, offset: float = 0.0) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, weight = _random(MAX_ROWS, size, dtype=dtype), _random(size, dtype=dtype)
        return lambda kernels, rows: kernels.rms_norm(x[rows], weight, 1e-6, offset)

    return make


def _rms_norm_of_heads(num_heads: int, size: int) -> Callable[[torch.dtype], Op]:
    """As a model does it: the heads are a slice of a wider projection."""

    def make(dtype: torch.dtype) -> Op:
        wide, weight = _random(MAX_ROWS, 2 * num_heads * size, dtype=dtype), _random(size, dtype=dtype)
        heads = wide[:, : num_heads * size].unflatten(1, (num_heads, size))  # type: ignore[no-untyped-call]
        return lambda kernels, rows: kernels.rms_norm(heads[rows], weight, 1e-6)

    return make


def _add_rms_norm(size: int) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, residual = _random(MAX_ROWS, size, dtype=dtype), _random(MAX_ROWS, size, dtype=dtype).flip(0)
        weight = _random(size, dtype=dtype)
        return lambda kernels, rows: torch.cat(kernels.add_rms_norm(x[rows], _fused(residual[rows], weight)), dim=-1)

    return make


def _layer_norm(size: int, *, has_bias: bool) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, residual = _random(MAX_ROWS, size, dtype=dtype) + 2, _random(MAX_ROWS, size, dtype=dtype).flip(0)
        weight = _random(size, dtype=dtype)
        bias = weight.flip(0) if has_bias else None

        def op(kernels: Kernels, rows: slice) -> torch.Tensor:
            fused = replace(_fused(residual[rows], weight), is_centered=True, norm_bias=bias)
            return torch.cat(kernels.add_rms_norm(x[rows], fused), dim=-1)

        return op

    return make


def _layer_normed_mlp(size: int, inner_size: int, activation: Activation) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, residual = _random(MAX_ROWS, size, dtype=dtype), _random(MAX_ROWS, size, dtype=dtype).flip(0)
        weight, bias = _random(size, dtype=dtype), _random(size, dtype=dtype).flip(0)
        first = _random(2 * inner_size, size, dtype=dtype) * size**-0.5
        second = _random(size, inner_size, dtype=dtype) * inner_size**-0.5
        up = cache(lambda kernels: _pack_up(kernels, first, None, activation))
        down = cache(lambda kernels: kernels.pack_linear(second, None))

        def op(kernels: Kernels, rows: slice) -> torch.Tensor:
            fused = replace(_fused(residual[rows], weight, activation), is_centered=True, norm_bias=bias)
            return torch.cat(kernels.mlp(x[rows], fused, up(kernels), down(kernels)), dim=-1)

        return op

    return make


def _part_norms(first: int, second: int, rest: int) -> Callable[[torch.dtype], Op]:
    """Two norms over parts of rows, of which this rank has all."""

    def make(dtype: torch.dtype) -> Op:
        x, sizes = _random(MAX_ROWS, first + second + rest, dtype=dtype), (first, second)
        norms = PartNorms(sizes=sizes, totals=sizes, weights=(_random(first), _random(second)), eps=1e-5)

        def op(kernels: Kernels, rows: slice) -> torch.Tensor:
            mine = x[rows].clone()
            return kernels.scale_parts(mine, kernels.part_squares(mine, sizes, 2), norms)

        return op

    return make


def _activate(size: int, activation: Activation = SILU) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x = 3 * _random(MAX_ROWS, (1 + activation.is_gated) * size, dtype=dtype)
        return lambda kernels, rows: kernels.activate(x[rows], activation)

    return make


def _gated_product(size: int, first: int, activation: Activation) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        gate, x = 3 * _random(MAX_ROWS, size, dtype=dtype), _random(MAX_ROWS, first + size + 5, dtype=dtype)
        return lambda kernels, rows: kernels.gated_product(gate[rows], x[rows], first, activation)

    return make


def _scaled_sum(size: int, *, has_residual: bool) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x = _random(MAX_ROWS, size, dtype=dtype)
        residual = x.flip(0) if has_residual else None
        return lambda kernels, rows: kernels.scaled_sum(x[rows], None if residual is None else residual[rows], 0.7)

    return make


def _gelu(size: int, kind: GeluKind) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x = 3 * _random(MAX_ROWS, size, dtype=dtype)
        return lambda kernels, rows: kernels.gelu(x[rows], kind)

    return make


def _rotary(num_heads: int, size: int, rotary_dim: int | None = None) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        wide, angles = (
            _random(MAX_ROWS, num_heads + 3, size, dtype=dtype),
            9 * _random(MAX_ROWS, (size if rotary_dim is None else rotary_dim) // 2),
        )
        cos, sin = angles.cos(), angles.sin()
        return lambda kernels, rows: kernels.rotary(wide[rows, :num_heads], cos[rows], sin[rows])

    return make


def _select_columns(size: int, num_padded: int = 0) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x = _random(MAX_ROWS, size, dtype=dtype)
        order = torch.cat((torch.full((num_padded,), -1), _random(size).argsort()))[
            _random(size + num_padded).argsort()
        ]
        columns = order.to(torch.int32)
        return lambda kernels, rows: kernels.select_columns(x[rows], columns)

    return make


SCALED = RoutingSpec(scale=16.0)
BY_BEST = RoutingSpec(num_groups=4, top_groups=2, scale=1.5, gates_shared=False)
BY_TWO = RoutingSpec(
    scores="sigmoid",
    num_groups=6,
    top_groups=3,
    group_best=2,
    has_correction=True,
    scale=2.5,
    epsilon=1e-20,
    gates_shared=False,
)
SIGMOID = RoutingSpec(scores="sigmoid", has_correction=True, epsilon=1e-20)
FIVE_OF_24 = _routing(24, 5, BY_TWO, renormalizes=True, has_shared=True)
TWO_OF_FIVE = _routing(5, 2, renormalizes=True, has_shared=False)
CASES = [
    Case(name="linear-37x84", make=_linear(37, 84, has_bias=True)),
    Case(name="linear-84x100", make=_linear(84, 100, has_bias=False)),
    Case(name="linear-1x3", make=_linear(1, 3, has_bias=True)),
    Case(name="linear-512x64", make=_linear(512, 64, has_bias=False)),
    Case(name="linear-256x2048", make=_linear(256, 2048, has_bias=True)),
    Case(name="linear-900x1000", make=_linear(900, 1000, has_bias=False)),
    Case(name="logits_linear-300x64", make=_logits_linear(300, 64)),
    Case(name="activated_linear-37x84", make=_activated_linear(37, 84, has_bias=True)),
    Case(name="activated_linear-96x100", make=_activated_linear(96, 100, has_bias=False)),
    Case(name="normed_linear-100x84", make=_normed_linear(100, 84)),
    Case(name="mlp-84x37", make=_mlp(84, 37)),
    Case(name="mlp-64x200", make=_mlp(64, 200)),
    Case(name="mlp-offset", make=_mlp(84, 37, offset=1.0)),
    Case(name="gated_product-37", make=_gated_product(37, 11, Activation("gelu_tanh"))),
    Case(name="gated_product-64", make=_gated_product(64, 32, SILU)),
    Case(name="scaled_sum-84", make=_scaled_sum(84, has_residual=True)),
    Case(name="scaled_sum-37", make=_scaled_sum(37, has_residual=False)),
    Case(name="rms_norm-offset", make=_rms_norm(100, 1.0)),
    Case(name="rotary-partial-3x20", make=_rotary(3, 20, 12)),
    Case(name="rotary-partial-2x128", make=_rotary(2, 128, 64)),
    *(
        case
        for kind in OTHERS
        for case in (
            Case(name=f"activated_linear-{kind.kind}", make=_activated_linear(70, 84, has_bias=True, activation=kind)),
            Case(name=f"mlp-{kind.kind}", make=_mlp(84, 70, kind)),
            Case(name=f"expert_rows-{kind.kind}", make=_expert_rows(84, [37, 70, 37], kind)),
            Case(
                name=f"moe-{kind.kind}",
                make=_moe(84, [37] * 5, TWO_OF_FIVE, kind),
            ),
            Case(name=f"activate-{kind.kind}", make=_activate(100, kind)),
        )
    ),
    Case(name="route-2-of-5", make=_route(84, _routing(5, 2, renormalizes=True, has_shared=False))),
    Case(name="route-3-of-40", make=_route(100, _routing(40, 3, renormalizes=False, has_shared=True))),
    Case(name="route-8-of-128", make=_route(256, _routing(128, 8, renormalizes=True, has_shared=False))),
    Case(name="route-scaled", make=_route(84, _routing(5, 2, SCALED, renormalizes=False, has_shared=True))),
    Case(name="route-groups-by-best", make=_route(84, _routing(24, 5, BY_BEST, renormalizes=False, has_shared=True))),
    Case(name="route-groups-by-two", make=_route(84, _routing(24, 5, BY_TWO, renormalizes=True, has_shared=True))),
    Case(name="route-sigmoid-corrected", make=_route(84, _routing(7, 3, SIGMOID, renormalizes=True, has_shared=False))),
    Case(name="expert_rows-84x37", make=_expert_rows(84, [37, 37, 37])),
    Case(name="expert_rows-64x96x200", make=_expert_rows(64, [96, 200])),
    Case(name="head_linears-3x37x20", make=_head_linears(3, 37, 20, 6)),
    Case(name="head_linears-2x64x96", make=_head_linears(2, 64, 96, 0)),
    Case(name="combine_experts-100x3", make=_combine_experts(100, 3)),
    Case(name="combine_experts-36x1", make=_combine_experts(36, 1)),
    Case(name="moe-1-of-1", make=_moe(36, [21], _routing(1, 1, renormalizes=True, has_shared=False))),
    Case(name="moe-2-of-5", make=_moe(84, [37] * 5, TWO_OF_FIVE)),
    Case(name="moe-2-of-3-shared", make=_moe(64, [40] * 3 + [72], _routing(3, 2, renormalizes=False, has_shared=True))),
    Case(
        name="moe-5-of-24-in-groups",
        make=_moe(64, [40] * 24 + [72], FIVE_OF_24),
    ),
    Case(name="moe-8-of-40", make=_moe(128, [64] * 40, _routing(40, 8, renormalizes=True, has_shared=False))),
    Case(name="rms_norm-37", make=_rms_norm(37)),
    Case(name="rms_norm-1024", make=_rms_norm(1024)),
    Case(name="rms_norm-of-heads-16x128", make=_rms_norm_of_heads(16, 128)),
    Case(name="rms_norm-of-heads-3x20", make=_rms_norm_of_heads(3, 20)),
    Case(name="add_rms_norm-100", make=_add_rms_norm(100)),
    Case(name="layer_norm-100", make=_layer_norm(100, has_bias=True)),
    Case(name="layer_norm-37", make=_layer_norm(37, has_bias=False)),
    Case(name="layer_normed_mlp-84x37", make=_layer_normed_mlp(84, 37, Activation("plain_gelu"))),
    Case(name="part_norms-60x20x20", make=_part_norms(60, 20, 20)),
    Case(name="activate-100", make=_activate(100)),
    Case(name="activate-37", make=_activate(37)),
    Case(name="activate-1536", make=_activate(1536)),
    Case(name="select_columns-37", make=_select_columns(37)),
    Case(name="select_columns-2100-padded", make=_select_columns(2100, 70)),
    Case(name="gelu-tanh-37", make=_gelu(37, "gelu_tanh")),
    Case(name="gelu-quick-100", make=_gelu(100, "quick_gelu")),
    Case(name="gelu-exact-37", make=_gelu(37, "gelu")),
    Case(name="gelu-exact-128", make=_gelu(128, "gelu")),
    Case(name="rotary-16x128", make=_rotary(16, 128)),
    Case(name="rotary-3x20", make=_rotary(3, 20)),
]
