"""`Kernels`: every op of layers, in plain torch. Faster kernels override the ops they speed up.

This is the specification: signature, shapes, meaning. Runs on any device. Arithmetic is in float32 and rounded once, at
the end, to the dtype of the input.

Legend: T = tokens, K = input size, N = output size, V = vocabulary, D = hidden or head size, H = heads,
I = intermediate size, X = experts, C = experts per token, R = pairs of a token and an expert; of adapters: S = slots,
P = parts of a merged linear, R = the largest rank.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.gguf.types import GgmlType
from octavo.kernels import gated_delta, short_conv, state_space
from octavo.kernels.blocks import dequantize
from octavo.kernels.gated_delta import GatedDeltaWeights
from octavo.kernels.quantization import Weight, WeightFormat
from octavo.kernels.routing import choose_experts
from octavo.kernels.short_conv import ShortConvWeights
from octavo.kernels.state_space import GroupNorm, StateSpaceWeights
from octavo.kernels.states import StateStep, StateTensors
from octavo.kernels.types import (
    Activation,
    Fused,
    GeluKind,
    LinearRole,
    PackedExperts,
    PackedHeads,
    PackedLinear,
    PartNorms,
    Routes,
    Routing,
)

_ALIGNED = 64  # elements: as many as two vectors of 16-bit floats
_ERF_SCALE = 0.3275911
_ERF_TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)  # of the highest power first
_GELU_FACTOR, _GELU_CUBIC = math.sqrt(2.0 / math.pi), 0.044715


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraAdapters:
    """Low-rank additions to one merged linear, by slot. Part p has rows p * R to (p + 1) * R - 1 of a slot's `down`.

    Allocated once (`Kernels.empty_lora`) and refilled in place. Rows beyond an adapter's own rank are never read.
    """

    down: Tensor  # [S, P * R, K]
    up: Tensor  # [S, R, N]: of output n, the ranks of its part; scaled by alpha / rank
    parts: tuple[int, ...]  # [P] outputs of each part, in order; their sum is N
    ranks: Tensor  # [S] int32, of each slot: the largest rank of the parts; 0: this linear is unchanged

    @property
    def max_rank(self) -> int:
        """Return R."""
        return self.up.shape[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertAdapters:
    """Adapters of a layer's experts, by number as in `PackedExperts`, and the tokens that use them."""

    gate_up: tuple[LoraAdapters, ...]
    down: tuple[LoraAdapters, ...]
    adapter_ids: Tensor  # [T] int64, the slot of each token; -1: none


class Kernels:
    """All ops of one device and dtype. Passed to layers at construction; stateless, safe to share.

    No op modifies its arguments, except for `load` of `moe`.
    """

    name: str = "torch-reference"
    is_batch_invariant: bool = False  # a row's result has the same bits whatever other rows are computed with it
    packing_copies: bool = False  # a weight that is both packed and read plain (a tied logits head) exists twice
    captures_experts: bool = False  # a step with experts can be captured: none of it syncs with the device
    reads_packed_rows: bool = False  # has `packed_rows`: a tied logits head, once packed, also serves as the embedding
    records_calls: bool = False  # ops between the first and last layer can be recorded: `worker/graph.py`

    @property
    def layout(self) -> str | None:
        """Identifies what the bytes of packed linears mean, where these can be saved and adopted; None: they cannot."""
        return None

    def pack_linear(
        self, weight: Weight, bias: Tensor | None, role: LinearRole = "plain", form: WeightFormat | None = None
    ) -> PackedLinear:
        """Convert weight [N, K] and bias [N] to the layout that ops of this role read: `LinearRole`. Once, at load.

        With a form, one that `computes` supports, a dense weight is quantized to it. A low-bit weight has its own form.
        """
        if not isinstance(weight, Tensor) or form is not None:
            raise TypeError(f"{self.name} has no kernels for weights of {form}")
        if role == "router":
            weight, bias = weight.float(), None if bias is None else bias.float()
        return PackedLinear(weight=weight, bias=bias, num_outputs=len(weight))

    def adopt_linear(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], role: LinearRole, form: WeightFormat | None = None
    ) -> PackedLinear:
        """Return a linear [N, K] made of saved `packed_tensors`, in place; kernels of the same `layout` packed them."""
        raise TypeError(f"{self.name} has no packed weights to restore")

    def first_outputs(self, packed: PackedLinear, count: int) -> PackedLinear:
        """Return the linear of the first `count` outputs, a multiple of 64: it shares the weight's memory."""
        bias = None if packed.bias is None else packed.bias[:count]
        return PackedLinear(weight=packed.weight[:count], bias=bias, num_outputs=count)

    def computes(self, form: WeightFormat) -> bool:
        """Return whether these kernels compute with weights of this form directly; `layers/quant/` handles the rest."""
        return False

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Return x [T, K] @ weight.T + bias, [T, N], accumulated in float32."""
        return F.linear(x, packed.weight, packed.bias)

    def kept_rows(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """Select the rows of x [T, D] listed in `kept` [W] int64, ascending; x itself for None."""
        return x if kept is None else x.index_select(0, kept)

    def select_columns(self, x: Tensor, order: Tensor) -> Tensor:
        """Return columns order [J] int32 of x [T, K]: [T, J]. Where J is not K, -1 selects zeros."""
        if len(order) == x.shape[1]:
            return x.index_select(1, order)
        return F.pad(x, (1, 0)).index_select(1, order + 1)

    def logits_linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Like `linear`, with float32 results."""
        return self.linear(x, packed).float()

    def logits_argmax(self, x: Tensor, packed: PackedLinear) -> tuple[Tensor, Tensor]:
        """Return the maximum of `logits_linear` [T] float32, and its first index [T] int64; NaN if any logit is."""
        values, ids = self.logits_linear(x, packed).max(-1)  # of ties, the lowest id
        return values, ids

    def gated_linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Apply a linear packed as "gated", but no activation: x [T, K] to [T, 2 * I], gates first."""
        return self.linear(x, packed)

    def activated_linear(self, x: Tensor, packed: PackedLinear, activation: Activation) -> Tensor:
        """Apply `linear`, round to the dtype, then `activate`: x [T, K] to [T, I]."""
        return self.activate(self.linear(x, packed), activation)

    def normed_linear(self, x: Tensor, fused: Fused, packed: PackedLinear) -> tuple[Tensor, Tensor]:
        """Return (the linear [T, N] of `add_rms_norm`, the sum [T, K]). Without a residual the sum is x itself."""
        normed, total = self.add_rms_norm(x, fused)
        return self.linear(normed, packed), total

    def mlp(self, x: Tensor, fused: Fused, up: PackedLinear, down: PackedLinear) -> tuple[Tensor, Tensor]:
        """Return (down(activated up(n)) [T, K], n being the norm of the sum; the sum [T, K]): see `add_rms_norm`."""
        normed, total = self.add_rms_norm(x, fused)
        return self.linear(self.activated_linear(normed, up, fused.activation), down), total

    def pack_experts(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> PackedExperts:
        """Combine experts from their packed linears: gate_up (activated) and down."""
        return PackedExperts(gate_up=tuple(gate_up), down=tuple(down))

    def router_logits(self, x: Tensor, router: PackedLinear) -> Tensor:
        """Return logits [T, X] of x [T, D], or [T, X + 1] with a gated shared expert: float32, never rounded."""
        return self.linear(x.float(), router)

    def route(self, x: Tensor, router: PackedLinear, routing: Routing) -> Routes:
        """Choose experts for tokens x [T, D]: `kernels/routing.py`."""
        return choose_experts(self.router_logits(x, router), routing)

    def expert_rows(
        self, x: Tensor, token_ids: Tensor, expert_ids: Tensor, experts: PackedExperts, activation: Activation
    ) -> Tensor:
        """Return [R, D]: row r is expert expert_ids[r]'s output on token token_ids[r] of x [T, D]; ids are int64."""
        rows = x.new_empty(len(expert_ids), x.shape[1])  # [R, D]
        counts = torch.bincount(expert_ids, minlength=len(experts.down)).tolist()
        by_expert = torch.split(expert_ids.argsort(stable=True), counts)
        for up, down, pairs in zip(experts.gate_up, experts.down, by_expert, strict=True):
            if len(pairs):
                rows[pairs] = self.linear(self.activated_linear(x[token_ids[pairs]], up, activation), down)
        return rows

    def adapted_expert_rows(
        self,
        x: Tensor,
        token_ids: Tensor,
        expert_ids: Tensor,
        experts: PackedExperts,
        activation: Activation,
        adapters: ExpertAdapters,
    ) -> Tensor:
        """Like `expert_rows`, each linear followed by `add_lora`. Waits for the device."""
        rows = x.new_empty(len(expert_ids), x.shape[1])  # [R, D]
        for expert, (up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
            pairs = (expert_ids == expert).nonzero()[:, 0]
            if len(pairs) == 0:
                continue
            tokens, ids = x[token_ids[pairs]], adapters.adapter_ids[token_ids[pairs]]
            inner = self.gated_linear(tokens, up) if activation.is_gated else self.linear(tokens, up)
            inner = self.activate(self.add_lora(inner, tokens, adapters.gate_up[expert], ids), activation)
            rows[pairs] = self.add_lora(self.linear(inner, down), inner, adapters.down[expert], ids)
        return rows

    def combine_experts(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sum rows [T, C, D] weighted by weights [T, C] float32: [T, D].

        In float32, in the order of a token's experts, each product rounded before it is added.
        """
        total = rows[:, 0].float() * weights[:, :1]  # [T, D]
        for choice in range(1, rows.shape[1]):
            total += rows[:, choice].float() * weights[:, choice, None]
        return total.to(rows.dtype)

    def moe(
        self,
        x: Tensor,
        fused: Fused,
        router: PackedLinear,
        routing: Routing,
        experts: PackedExperts,
        load: Tensor,
        is_counted: Tensor | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (the experts' output on `add_rms_norm` [T, D], the sum [T, D]), with adapters if there are any.

        Adds to load [X] int64 how many tokens chose each expert: the only argument that an op modifies. With is_counted
        [T] int64, only tokens where it is 1 count, the others being 0: kernels of devices that capture steps support
        it.
        """
        normed, total = self.add_rms_norm(x, fused)
        routes = self.route(normed, router, routing)
        chosen = routes.expert_ids[:, : routing.top_k].flatten()
        ones = torch.ones_like(chosen) if is_counted is None else is_counted.repeat_interleave(routing.top_k)
        load.scatter_add_(0, chosen, ones)  # bincount would wait for a GPU
        token_ids = torch.arange(len(x), device=x.device).repeat_interleave(routing.num_choices)  # [T * C]
        pairs = normed, token_ids, routes.expert_ids.flatten(), experts, fused.activation
        rows = self.expert_rows(*pairs) if adapters is None else self.adapted_expert_rows(*pairs, adapters)
        return self.combine_experts(rows.view(len(x), routing.num_choices, x.shape[1]), routes.weights), total

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory that stays and is read in every step."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def empty_lora(
        self,
        num_slots: int,
        max_rank: int,
        in_size: int,
        parts: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LoraAdapters:
        """Allocate slots for adapters of a linear [sum of parts, K]; none has an adapter yet. See `LoraAdapters`."""
        return LoraAdapters(
            down=self.zeros((num_slots, len(parts) * max_rank, in_size), dtype, device),
            up=self.zeros((num_slots, max_rank, sum(parts)), dtype, device),
            parts=parts,
            ranks=torch.zeros(num_slots, dtype=torch.int32, device=device),
        )

    def add_lora(self, base: Tensor, x: Tensor, adapters: LoraAdapters, adapter_ids: Tensor) -> Tensor:
        """Return base [T, N] plus the output of slot adapter_ids[t] [T] int64 for row t of x [T, K]; -1: no adapter.

        base + up(down(x)) (Hu et al. 2021, arXiv:2106.09685), in float32, rounded once. The result may overwrite base.
        """
        out = base.clone()
        for slot in sorted(set(adapter_ids.tolist())):
            if slot >= 0 and adapters.ranks[slot] > 0:
                rows = (adapter_ids == slot).nonzero()[:, 0]
                out[rows] = (base[rows].float() + self._lora(x[rows].float(), adapters, slot)).to(base.dtype)
        return out

    def _lora(self, x: Tensor, adapters: LoraAdapters, slot: int) -> Tensor:
        """Return up(down(x)) [T, N] of x [T, K] float32: sums over K, then over ranks in order; each row by itself."""
        down, up = adapters.down[slot].float(), adapters.up[slot].float()
        sums = []
        for part, up_of_part in enumerate(up.split_with_sizes(adapters.parts, dim=1)):
            total = x.new_zeros(len(x), up_of_part.shape[1])  # [T, outputs of the part]
            for rank in range(int(adapters.ranks[slot])):
                middle = (x * down[part * adapters.max_rank + rank]).sum(-1, keepdim=True)  # [T, 1]
                total += middle * up_of_part[rank]
            sums.append(total)
        return torch.cat(sums, dim=1)

    def packed_rows(self, ids: Tensor, packed: PackedLinear, size: int) -> Tensor:
        """Return rows ids [T] of a weight [N, K] packed as "logits": [T, K]; K is `size`."""
        return packed.weight.index_select(0, ids)

    def decoded_rows(self, rows: Tensor, kind: GgmlType) -> Tensor:
        """Return the values [T, K] float32 of rows [T, R] of blocks."""
        return dequantize(rows, kind).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Return x [..., D] / sqrt(mean(x^2) + eps) * (weight [D] + offset), the mean over the last dimension.

        Zhang and Sennrich 2019, arXiv:1910.07467.
        """
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [..., 1]
        factors = weight.float() + offset if offset else weight.float()
        return (wide * scale * factors).to(x.dtype)

    def add_rms_norm(self, x: Tensor, fused: Fused) -> tuple[Tensor, Tensor]:
        """Return (the norm of x + residual, x + residual), each [T, D]; without a residual the sum is x itself.

        The sum is rounded to the dtype, as later layers read it; the norm is taken of the rounded sum.
        """
        total = x if fused.residual is None else x + fused.residual
        if fused.is_centered:
            return self.layer_norm(total, fused), total
        return self.rms_norm(total, fused.norm_weight, fused.eps, fused.norm_offset), total

    def layer_norm(self, x: Tensor, fused: Fused) -> Tensor:
        """Return (x [T, D] - mean) / sqrt(variance + eps) * (weight + offset) + bias (arXiv:1607.06450)."""
        distance = x.float() - x.float().mean(-1, keepdim=True)
        scale = torch.rsqrt(distance.square().mean(-1, keepdim=True) + fused.eps)  # [T, 1]
        normed = distance * scale * (fused.norm_weight.float() + fused.norm_offset)
        return (normed if fused.norm_bias is None else normed + fused.norm_bias.float()).to(x.dtype)

    def part_squares(self, x: Tensor, sizes: tuple[int, int], num_counted: int) -> Tensor:
        """Return the sums of squares [T, 2] float32 of two parts at the front of x [T, N]; 0 of those not counted."""
        parts = x[:, : sum(sizes)].split_with_sizes(sizes, dim=1)
        squares = [part.contiguous().float().square() for part in parts]  # each row is then summed up by itself
        sums = [part.sum(-1) * (number < num_counted) for number, part in enumerate(squares)]
        return torch.stack(sums, dim=1)

    def scale_parts(self, x: Tensor, squares: Tensor, norms: PartNorms) -> Tensor:
        """Return x [T, N] with its parts normalized by the sums of squares [T, 2]; may overwrite it."""
        *parts, rest = x.split_with_sizes((*norms.sizes, x.shape[1] - sum(norms.sizes)), dim=1)
        scales = [torch.rsqrt(squares[:, at, None] / norms.totals[at] + norms.eps) for at in range(2)]
        normed = [
            (part.float() * scale * weight).to(x.dtype)
            for part, scale, weight in zip(parts, scales, norms.weights, strict=True)
        ]
        return torch.cat((*normed, rest), dim=1)

    def gelu(self, x: Tensor, kind: GeluKind) -> Tensor:
        """Return the GELU of x [T, I] (Hendrycks and Gimpel 2016, arXiv:1606.08415), rounded once.

        By the error function to some 1e-7, and otherwise approximated.
        """
        wide = x.float()  # from here on in place where it can be: fresh memory costs more than the arithmetic
        if kind == "gelu":
            if x.device.type == "cpu" and x.shape[-1] % _ALIGNED == 0 and _cuts_no_vectors(x.dtype):
                return F.gelu(x)  # a twelfth of the time
            return (wide * _normal_mass(wide)).to(x.dtype)
        if kind == "quick_gelu":
            powers = wide * -1.702
        else:
            powers = (wide * wide).mul_(_GELU_CUBIC).add_(1.0).mul_(wide).mul_(-2.0 * _GELU_FACTOR)
        return (wide / powers.exp_().add_(1.0)).to(x.dtype)

    def gated_gelu(self, x: Tensor, kind: GeluKind) -> Tensor:
        """Return gelu(gate) * up [T, I] of x [T, 2 * I], gates first."""
        gate, up = x.chunk(2, dim=-1)
        return self.gelu(gate.contiguous(), kind) * up

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """Apply the activation: x is [T, 2 * I] if gated, gates first, else [T, I]; returns [T, I]."""
        wide = x.float()
        if activation.kind == "plain_gelu":
            return self.gelu(x, "gelu_tanh")
        if not activation.is_gated:
            return wide.clamp(min=0.0).square().to(x.dtype)  # relu2 (So et al. 2021, arXiv:2109.08668)
        gate, up = wide.chunk(2, dim=-1)  # [T, I] each
        logits = gate  # of the sigmoid; silu: SwiGLU (Shazeer 2020, arXiv:2002.05202)
        if activation.kind == "gelu_tanh":  # GEGLU (same paper), GELU approximated (Hendrycks 2016, arXiv:1606.08415)
            # (1 + tanh(a)) / 2 is the sigmoid of 2a
            logits = 2.0 * (_GELU_FACTOR * (gate + _GELU_CUBIC * gate * gate * gate))
        elif activation.kind == "scaled_silu":
            gate = logits = activation.alpha * gate
        elif activation.kind == "clamped_swiglu":  # as in gpt-oss: gates are bounded above, ups on both sides, shifted
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit) + 1.0
            logits = activation.alpha * gate if activation.alpha != 1.0 else gate
        # By exp alone, never torch's sigmoid or tanh: those compute the tail of a thread's range, which fills no
        # vector, differently, so that the last bit would depend on the number of rows.
        return (gate / (1.0 + torch.exp(-logits)) * up).to(x.dtype)

    def gated_product(self, gate: Tensor, x: Tensor, first: int, activation: Activation) -> Tensor:
        """Return act(gate) * factors [T, I]: of gate [T, I], and the columns of x [T, S] from `first` on."""
        return self.activate(torch.cat((gate, x[:, first : first + gate.shape[1]]), dim=1), activation)

    def scaled_sum(self, x: Tensor, residual: Tensor | None, scale: float) -> Tensor:
        """Return (x + residual) * scale, of [T, D] each; the sum is rounded to the dtype first."""
        return (x if residual is None else x + residual) * scale

    def gate(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return x [T, D] times the sigmoid of logits [T, D], or [T, H], one a head; they may be ends of rows."""
        logits = logits.float()
        if logits.shape != x.shape:
            logits = logits.repeat_interleave(x.shape[1] // logits.shape[1], dim=1)
        return (x.float() / (1.0 + torch.exp(-logits))).to(x.dtype)

    def gated_delta_net(
        self, weights: GatedDeltaWeights, rows: Tensor, gates: Tensor, states: StateTensors, step: StateStep
    ) -> Tensor:
        """Return `gated_delta.gated_delta_net`: linear attention of rows [T, C + H * V] and gates [T, 2 * H]."""
        return gated_delta.gated_delta_net(weights, rows, gates, states, step)

    def short_conv(self, weights: ShortConvWeights, rows: Tensor, states: StateTensors, step: StateStep) -> Tensor:
        """Return `short_conv.short_conv`: a convolution between two gates, of rows [T, 3 * C]."""
        return short_conv.short_conv(weights, rows, states, step)

    def state_space(self, weights: StateSpaceWeights, rows: Tensor, states: StateTensors, step: StateStep) -> Tensor:
        """Return `state_space.state_space`: Mamba-2 of rows [T, W + C + H]."""
        return state_space.state_space(weights, rows, states, step)

    def group_sums(self, x: Tensor, norm: GroupNorm) -> Tensor:
        """Return `state_space.group_sums`: what ranks that share groups of columns add up before `norm_groups`."""
        return state_space.group_sums(x, norm)

    def norm_groups(self, x: Tensor, norm: GroupNorm, gates: Tensor | None, sums: Tensor | None) -> Tensor:
        """Return `state_space.norm_groups`: the norm of groups of columns of x [T, W]."""
        return state_space.norm_groups(x, norm, gates, sums)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, H, D] by cos, sin [T, P] float32, 2 * P <= D: element i pairs with i + P; the rest is unchanged.

        Each pair turns by the angle of its position and i (Su et al. 2021, arXiv:2104.09864).
        """
        num_pairs = cos.shape[1]  # P
        first, second, rest = x.float().split_with_sizes((num_pairs, num_pairs, x.shape[2] - 2 * num_pairs), dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, P]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
        return turned.to(x.dtype)

    def rotary_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, H, D] by cos, sin [T, P] float32, 2 * P <= D: element 2 * i pairs with 2 * i + 1."""
        front, rest = x.float().split_with_sizes((2 * cos.shape[1], x.shape[2] - 2 * cos.shape[1]), dim=-1)
        first, second = front.reshape(*x.shape[:-1], -1, 2).unbind(-1)  # [T, H, P] each
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((turned.flatten(-2), rest), dim=-1).to(x.dtype)

    def pack_heads(self, linears: Sequence[PackedLinear], in_size: int) -> PackedHeads:
        """Combine a linear for each head, of `in_size` inputs, from their packed linears: "plain", without bias."""
        return PackedHeads(linears=tuple(linears), in_size=in_size)

    def head_linears(self, x: Tensor, heads: PackedHeads) -> Tensor:
        """Apply to the first K elements of each head of x [T, H * (K + R)] its linear: [T, H * (N + R)].

        The other R follow as they are.
        """
        outs = []
        for head, linear in zip(x.chunk(len(heads.linears), dim=1), heads.linears, strict=True):
            outs += [self.linear(head[:, : heads.in_size], linear), head[:, heads.in_size :]]
        return torch.cat(outs, dim=1)


@cache
def _cuts_no_vectors(dtype: torch.dtype) -> bool:
    """Return whether torch's exact GELU gives rows of whole vectors the same bits in any batch: measured, once.

    Elements in the tail of a vector, or of a thread's range, may be computed by other instructions.
    """
    x = torch.linspace(-9.0, 9.0, 131 * 9 * _ALIGNED).to(dtype).view(131, -1)
    return bool(torch.equal(F.gelu(x), torch.cat([F.gelu(row) for row in torch.split(x, 1)])))


def _normal_mass(x: Tensor) -> Tensor:
    """Return the mass of the normal distribution below x float32.

    By exp alone: see `Kernels.activate`. Abramowitz and Stegun 1964, 7.1.26.
    """
    size = x.abs()
    inverse = 1.0 / (size * (_ERF_SCALE * math.sqrt(0.5)) + 1.0)
    tail = torch.full_like(x, _ERF_TERMS[0])
    for term in _ERF_TERMS[1:]:
        tail.mul_(inverse).add_(term)
    tail.mul_(inverse).mul_((size * size * -0.5).exp_()).mul_(0.5)  # above |x|
    return torch.where(x < 0.0, tail, 1.0 - tail)


def hyperbolic_tangent(x: Tensor) -> Tensor:
    """Return tanh(x), to some 1e-7, by exp alone: see `Kernels.activate`."""
    powers = (x.abs() * -2.0).exp_()
    return ((1.0 - powers) / (1.0 + powers)).copysign_(x)
