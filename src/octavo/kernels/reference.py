"""Every op in plain torch: the specification that faster forms are tested against. Runs on any device.

Legend: T = tokens, K = input size, N = output size, V = vocabulary, D = hidden or head size, H = heads,
I = intermediate size, X = experts, C = experts that a token chooses, R = pairs of a token and an expert.

Arithmetic is in float32 and rounded once, at the end, to the dtype of the input.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from octavo.kernels.dispatch import LinearRole, LoraAdapters, PackedExperts, PackedLinear, Routes, Routing
from octavo.kernels.quantization import QuantizedWeight, WeightFormat


class ReferenceKernels:
    """See `Kernels` for shapes."""

    name = "torch-reference"
    is_row_invariant = False  # torch chooses its way through a matmul by the number of rows
    packing_copies = False
    captures_experts = False  # it asks how many rows each expert has
    reads_packed_rows = False  # there is nothing to gain: the plain layout is the packed one

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Keep the plain layout, [N, K]."""
        return PackedLinear(weight=weight, bias=bias, num_outputs=weight.shape[0])

    def computes(self, form: WeightFormat) -> bool:
        """None: layers dequantize for these kernels, see `layers/quant/packing.py`."""
        return False

    def pack_quantized(
        self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, form: WeightFormat, role: LinearRole
    ) -> PackedLinear:
        """Refused: see `computes`."""
        raise TypeError(f"{self.name} does not compute with weights of {form}")

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x @ weight.T + bias, accumulated in float32."""
        return F.linear(x, packed.weight, packed.bias)

    def kept_rows(self, x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """x[kept]."""
        return x if kept is None else x.index_select(0, kept)

    def pack_logits_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """As any linear map."""
        return self.pack_linear(weight, bias)

    def logits_linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """As `linear`, to float32."""
        return self.linear(x, packed).float()

    def largest_logits(self, x: torch.Tensor, packed: PackedLinear) -> tuple[torch.Tensor, torch.Tensor]:
        """Of equal ones `max` names the lowest id."""
        values, ids = self.logits_linear(x, packed).max(-1)
        return values, ids

    def pack_gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """As any linear map."""
        return self.pack_linear(weight, bias)

    def gated_linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """silu(gate) * up of the map's two halves, which are rounded to the dtype first."""
        return self.silu_and_mul(self.linear(x, packed))

    def normed_linear(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        packed: PackedLinear,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """add_rms_norm, then linear."""
        if residual is None:
            return self.linear(self.rms_norm(x, norm_weight, eps), packed), x
        normed, total = self.add_rms_norm(x, residual, norm_weight, eps)
        return self.linear(normed, packed), total

    def gated_mlp(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        gate_up: PackedLinear,
        down: PackedLinear,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """add_rms_norm, gated_linear, linear."""
        normed, total = self.add_rms_norm(x, residual, norm_weight, eps)
        return self.linear(self.gated_linear(normed, gate_up), down), total

    def pack_router(self, weight: torch.Tensor) -> PackedLinear:
        """As any linear map, in float32."""
        return self.pack_linear(weight.float(), None)

    def pack_experts(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> PackedExperts:
        """Keep them side by side."""
        return PackedExperts(gate_up=tuple(gate_up), down=tuple(down))

    def router_logits(self, x: torch.Tensor, router: PackedLinear) -> torch.Tensor:
        """Map x [T, D] to [T, X], or [T, X + 1] with a shared expert: float32, rounded nowhere."""
        return self.linear(x.float(), router)

    def route(self, x: torch.Tensor, router: PackedLinear, routing: Routing) -> Routes:
        """The largest logits, which are float32, equal ones by the lower number; weighed by softmax."""
        logits = self.router_logits(x, router)
        of_choice = logits[:, : routing.num_experts]
        ranked, order = of_choice.sort(dim=-1, descending=True, stable=True)
        chosen, ids = ranked[:, : routing.top_k], order[:, : routing.top_k]  # [T, top_k] each
        powers = torch.exp(chosen - chosen[:, :1])
        all_powers = powers if routing.renormalises else torch.exp(of_choice - chosen[:, :1])
        weights = powers / all_powers.sum(-1, keepdim=True)
        if routing.has_shared:
            ids = F.pad(ids, (0, 1), value=routing.num_experts)
            weights = torch.cat((weights, 1.0 / (1.0 + torch.exp(-logits[:, routing.num_experts :]))), dim=-1)
        return Routes(expert_ids=ids, weights=weights)

    def expert_rows(
        self, x: torch.Tensor, token_ids: torch.Tensor, expert_ids: torch.Tensor, experts: PackedExperts
    ) -> torch.Tensor:
        """gated_linear, linear: expert by expert, of all its rows at once."""
        rows = x.new_empty(len(expert_ids), x.shape[1])  # [R, D]
        counts = torch.bincount(expert_ids, minlength=len(experts.down)).tolist()
        by_expert = torch.split(expert_ids.argsort(stable=True), counts)
        for gate_up, down, pairs in zip(experts.gate_up, experts.down, by_expert, strict=True):
            if len(pairs):
                rows[pairs] = self.linear(self.gated_linear(x[token_ids[pairs]], gate_up), down)
        return rows

    def combine_experts(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """In float32, in the order in which a token's experts come, each product rounded before it is added."""
        total = rows[:, 0].float() * weights[:, :1]  # [T, D]
        for choice in range(1, rows.shape[1]):
            total += rows[:, choice].float() * weights[:, choice, None]
        return total.to(rows.dtype)

    def moe(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        router: PackedLinear,
        routing: Routing,
        experts: PackedExperts,
        load: torch.Tensor,
        is_counted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """add_rms_norm, route, expert_rows, combine_experts."""
        normed, total = self.add_rms_norm(x, residual, norm_weight, eps)
        routes = self.route(normed, router, routing)
        chosen = routes.expert_ids[:, : routing.top_k].flatten()
        ones = torch.ones_like(chosen) if is_counted is None else is_counted.repeat_interleave(routing.top_k)
        load.scatter_add_(0, chosen, ones)  # bincount would wait for a GPU
        token_ids = torch.arange(len(x), device=x.device).repeat_interleave(routing.num_choices)  # [T * C]
        rows = self.expert_rows(normed, token_ids, routes.expert_ids.flatten(), experts)
        return self.combine_experts(rows.view(len(x), routing.num_choices, x.shape[1]), routes.weights), total

    def add_lora(
        self, base: torch.Tensor, x: torch.Tensor, adapters: LoraAdapters, adapter_ids: torch.Tensor
    ) -> torch.Tensor:
        """base + up(down(x)) (Hu et al. 2021, arXiv:2106.09685); down(x) is rounded to the dtype."""
        ids = adapter_ids.clamp(min=0)
        middle = torch.einsum("tk,trk->tr", x.float(), adapters.down[ids].float()).to(x.dtype)
        added = torch.einsum("tr,tnr->tn", middle.float(), adapters.up[ids].float())
        return torch.where((adapter_ids < 0).unsqueeze(1), base, (base.float() + added).to(base.dtype))

    def embedding(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """table[ids]."""
        return table.index_select(0, ids)

    def packed_rows(self, ids: torch.Tensor, packed: PackedLinear, size: int) -> torch.Tensor:
        """weight[ids]."""
        return packed.weight.index_select(0, ids)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv:1910.07467)."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [..., 1]
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum is rounded to the dtype, as later layers read it; the norm is taken of the rounded sum."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate / (1 + exp(-gate)) * up (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""
        gate, up = gate_up.float().chunk(2, dim=-1)  # [T, I] each
        # Not F.silu: where torch cuts an array between threads, its sigmoid takes the elements that fill no vector by
        # another path, and their last bit then depends on T. exp has one path.
        return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Turn the pair (x[i], x[i + D / 2]) by the angle of its position and i (Su et al. 2021, arXiv:2104.09864)."""
        first, second = x.float().chunk(2, dim=-1)  # [T, H, D / 2] each
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, D / 2]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x.dtype)
