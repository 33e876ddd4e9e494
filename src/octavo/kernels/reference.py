"""Every op in plain torch: the specification that faster forms are tested against. Runs on any device.

Legend: T = tokens, K = input size, N = output size, V = vocabulary, D = hidden or head size, H = heads,
I = intermediate size.

Arithmetic is in float32 and rounded once, at the end, to the dtype of the input.
"""

import torch
import torch.nn.functional as F

from octavo.kernels.dispatch import PackedLinear


class ReferenceKernels:
    """See `Kernels` for shapes."""

    name = "torch-reference"
    is_row_invariant = False  # torch chooses its way through a matmul by the number of rows
    packing_copies = False

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Keep the plain layout, [N, K]."""
        return PackedLinear(weight=weight, bias=bias, num_outputs=weight.shape[0])

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x @ weight.T + bias, accumulated in float32."""
        return F.linear(x, packed.weight, packed.bias)

    def pack_logits_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """As any linear map."""
        return self.pack_linear(weight, bias)

    def logits_linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """As `linear`, to float32."""
        return self.linear(x, packed).float()

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

    def embedding(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """table[ids]."""
        return table.index_select(0, ids)

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
