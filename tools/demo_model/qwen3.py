"""The model for training: a plain Qwen3 decoder in torch, with the parameter names of its checkpoints.

Shapes: B rows, T tokens per row, D hidden, H query heads, G KV heads, K head size, V vocabulary, N positions with
logits. Source: the Qwen3 technical report (arXiv 2505.09388); rotary embedding: arXiv 2104.09864.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dimensions of the demo model; all matrix dimensions are multiples of 128."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    """Normalize to unit mean square, then scale by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))  # [size]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotary_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cosine and sine for every position: two tensors [max_positions, K]."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim  # [K/2]
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float64), shape.rope_theta**-exponents)
    both = torch.cat((angles, angles), dim=-1)  # [max_positions, K]
    return both.cos().float(), both.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + K/2) by its position's angle: x [B, T, heads, K], cos and sin [T, 1, K]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention with QK norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(self.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        rows, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, length, self.heads, self.head_dim))  # [B, T, H, K]
        k = self.k_norm(self.k_proj(x).view(rows, length, self.kv_heads, self.head_dim))  # [B, T, G, K]
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_dim)  # [B, T, G, K]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeats = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)  # [B, T, H, K]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, K]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)  # [B, T, H, K]
        out: Tensor = self.o_proj(mixed.reshape(rows, length, self.heads * self.head_dim))
        return out


class MLP(nn.Module):
    """The gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP, each with pre-norm and residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Qwen3(nn.Module):
    """Token ids to logits, with tied embeddings. State names are those under `model.` in a checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        cos, sin = rotary_table(shape)
        self.register_buffer("cos", cos, persistent=False)  # [max_positions, K]
        self.register_buffer("sin", sin, persistent=False)  # [max_positions, K]
        self.apply(self._initialise)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # limit growth with depth
                nn.init.normal_(weight, std=0.02 / (2 * shape.num_layers) ** 0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> final hidden states [B, T, D]"""
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        length = ids.shape[1]
        cos = self.get_buffer("cos")[:length, None].to(x.dtype)  # [T, 1, K]
        sin = self.get_buffer("sin")[:length, None].to(x.dtype)  # [T, 1, K]
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V]"""
        return F.linear(hidden, self.embed_tokens.weight)
