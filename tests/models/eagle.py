"""EAGLE-3 heads with random weights, and a plain implementation of them that shares no code with Octavo's.

From the paper (Li et al. 2025, arXiv:2503.01840) and the published checkpoints: entry p is token p + 1 next to the
model's state at position p, rotated by position p.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyHead:
    """A head for a model of `target_size` hidden elements and `vocab_size` tokens."""

    target_size: int = 36
    vocab_size: int = 97
    draft_vocab_size: int = 61
    hidden_size: int = 36
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 10
    intermediate_size: int = 29
    num_states: int = 3
    max_len: int = 64
    has_embedding: bool = False
    norm_before_residual: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # of config.json, besides the sizes above

    def tensors(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return random weights under the names of the original repository."""
        generator = torch.Generator().manual_seed(seed)
        size, heads, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (size, self.num_states * self.target_size),
            "midlayer.self_attn.q_proj.weight": (heads, 2 * size),
            "midlayer.self_attn.k_proj.weight": (kv, 2 * size),
            "midlayer.self_attn.v_proj.weight": (kv, 2 * size),
            "midlayer.self_attn.o_proj.weight": (size, heads),
            "midlayer.mlp.gate_proj.weight": (self.intermediate_size, size),
            "midlayer.mlp.up_proj.weight": (self.intermediate_size, size),
            "midlayer.mlp.down_proj.weight": (size, self.intermediate_size),
            "midlayer.input_layernorm.weight": (size,),
            "midlayer.hidden_norm.weight": (size,),
            "midlayer.post_attention_layernorm.weight": (size,),
            "norm.weight": (size,),
            "lm_head.weight": (self.draft_vocab_size, size),
        }
        if self.has_embedding:
            shapes["embed_tokens.weight"] = (self.vocab_size, size)
        tensors = {
            name: (1.0 if len(shape) == 1 else 0.0) + 0.25 * torch.randn(shape, generator=generator)
            for name, shape in shapes.items()
        }
        kept = torch.randperm(self.vocab_size, generator=generator)[: self.draft_vocab_size].sort().values
        tensors["d2t"] = kept - torch.arange(self.draft_vocab_size)
        tensors["t2d"] = torch.isin(torch.arange(self.vocab_size), kept)
        return tensors

    def config(self) -> dict[str, Any]:
        """Return the contents of `config.json`."""
        sizes = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_act": "silu",
            "num_hidden_layers": 1,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_len,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "norm_before_residual": self.norm_before_residual,
        }
        if self.target_size != self.hidden_size:
            sizes["target_hidden_size"] = self.target_size
        return {**sizes, **self.settings}

    def save(self, folder: Path, tensors: dict[str, torch.Tensor] | None = None, *, as_pickle: bool = False) -> None:
        """Write a checkpoint."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config()))
        tensors = self.tensors() if tensors is None else tensors
        if as_pickle:
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors")


class ReferenceHead:
    """The forward pass of one head for one request, from scratch for every draft."""

    def __init__(self, head: TinyHead, tensors: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
        """`embedding` [V, D] is the model's; a head's own is preferred."""
        self.head, self.weights = head, dict(tensors)
        self.embedding = tensors.get("embed_tokens.weight", embedding)

    def drafts(self, tokens: list[int], states: torch.Tensor, count: int) -> list[int]:
        """Return the greedy drafts after `tokens` [n], of which the model has computed `states` [n - 1, F]."""
        hidden = states @ self.weights["fc.weight"].T  # [n - 1, D]
        context = tokens[1:]
        drafts: list[int] = []
        for _ in range(count):
            stream = self._layer(self.embedding[torch.tensor(context)], hidden)
            logits = self.weights["lm_head.weight"] @ self._norm("norm", stream)[-1]
            choice = int(logits.argmax())
            drafts.append(choice + int(self.weights["d2t"][choice]))
            context = [*context, drafts[-1]]
            hidden = torch.cat((hidden, stream[-1:]))
        return drafts

    def _layer(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        normed = self._norm("midlayer.hidden_norm", hidden)
        stream = normed if self.head.norm_before_residual else hidden
        both = torch.cat((self._norm("midlayer.input_layernorm", embeddings), normed), dim=1)
        stream = stream + self._linear("self_attn.o_proj", self._attend(both))
        inner = self._norm("midlayer.post_attention_layernorm", stream)
        gate = torch.nn.functional.silu(self._linear("mlp.gate_proj", inner))
        return stream + self._linear("mlp.down_proj", gate * self._linear("mlp.up_proj", inner))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        length, size = len(x), self.head.head_dim
        queries, keys, values = (self._linear(f"self_attn.{part}_proj", x).view(length, -1, size) for part in "qkv")
        queries, keys = self._rotate(queries), self._rotate(keys)
        repeats = self.head.num_heads // self.head.num_kv_heads
        keys, values = (each.repeat_interleave(repeats, dim=1) for each in (keys, values))
        scores = torch.einsum("qhe,khe->hqk", queries, keys) / size**0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("hqk,khe->qhe", scores.softmax(-1), values).reshape(length, -1)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = self.head.head_dim // 2
        angles = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(half) / half)  # [n, E / 2]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[f"midlayer.{name}.weight"].T

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def logits(self, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        """Return the logits [n - 1, V] of drafts after each two tokens and more of `tokens` [n]."""
        hidden = states @ self.weights["fc.weight"].T
        stream = self._layer(self.embedding[torch.tensor(tokens[1:])], hidden)
        return self._norm("norm", stream) @ self.weights["lm_head.weight"].T


def states_of(model: Any, tokens: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Return the inputs [n, F] of some layers of transformers' model, side by side."""
    with torch.no_grad():
        hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[layer][0] for layer in layers], dim=1)


def memorizing(
    head: TinyHead, model: Any, sequences: list[tuple[list[int], int]], num_steps: int = 20
) -> dict[str, torch.Tensor]:
    """Return weights that draft these sequences well: each has tokens, and the number of those that are prompt."""
    tensors = head.tensors()
    embedding = model.get_input_embeddings().weight.detach()
    to_draft = {int(token): index for index, token in enumerate(tensors["d2t"] + torch.arange(head.draft_vocab_size))}
    batch = []
    for tokens, num_prompt in sequences:
        states = states_of(model, tokens, layers=tuple(range(head.num_states)))[:-1]
        at = [index for index in range(max(num_prompt, 2), len(tokens)) if tokens[index] in to_draft]
        wanted = torch.tensor([to_draft[tokens[index]] for index in at])
        batch.append((tokens[:-1], states[:-1], torch.tensor(at) - 2, wanted))
    trained = [tensor.requires_grad_() for tensor in tensors.values() if tensor.is_floating_point()]
    optimizer = torch.optim.Adam(trained, lr=0.04)
    reference = ReferenceHead(head, tensors, embedding)
    for _ in range(num_steps):
        losses = [
            torch.nn.functional.cross_entropy(reference.logits(tokens, states)[at], wanted)
            for tokens, states, at, wanted in batch
        ]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]  # torch has no type for it
        optimizer.step()
    return {name: tensor.detach() for name, tensor in tensors.items()}
