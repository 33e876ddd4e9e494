"""Train an EAGLE-3 head for the demo model, to measure what one brings.

    python tools/demo_model/draft_head.py --out DIR [--steps N] [--threads 2]

As in the paper (Li et al. 2025, arXiv:2503.01840): the head learns what the model would say, on the demo model's own
text, and also drafts from its own outputs while it learns, as deep as `DEPTH`.

Shapes: B rows, T tokens per row, D hidden size, F three of them, H heads, K head size.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.demo_model.batches import Batch, Packer
from tools.demo_model.qwen3 import MLP, RMSNorm, Shape, rotary_table, rotate

BASE = Path(__file__).resolve().parents[2] / "src/octavo/demo"
DEPTH, DISCOUNT = 3, 0.8
LAYERS = (2, 3, 5)  # whose inputs are read
ROWS, LENGTH, RATE, WARMUP, SAVE_EVERY = 8, 256, 2e-3, 20, 50
SHAPE = Shape(intermediate_size=512)


class Attention(nn.Module):
    """Attention over states of the model up to a depth, then over the head's own entries."""

    def __init__(self) -> None:
        super().__init__()
        size = SHAPE.num_heads * SHAPE.head_dim
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(2 * SHAPE.hidden_size, size, bias=False))
        self.o_proj = nn.Linear(size, SHAPE.hidden_size, bias=False)

    def forward(self, x: Tensor, earlier: list[tuple[Tensor, Tensor]], table: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T, 2 D] -> [B, T, D]. At depth d, entry p sees the d entries before it at their own depths."""
        q, k, v = (
            getattr(self, name)(x).unflatten(-1, (SHAPE.num_heads, SHAPE.head_dim))
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = rotate(q, *table), rotate(k, *table)  # [B, T, H, K]
        earlier.append((k, v))
        depth, length = len(earlier) - 1, x.shape[1]
        first_k, first_v = earlier[0]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1 - depth)
        scores = torch.einsum("bqhk,bshk->bhqs", q, first_k).masked_fill(hidden, -torch.inf)
        own = [
            tuple(F.pad(each, (0, 0, 0, 0, depth - at, 0))[:, :length] for each in earlier[at])
            for at in range(1, depth + 1)
        ]
        extra = [torch.einsum("bqhk,bqhk->bhq", q, key).unsqueeze(-1) for key, _ in own]
        weights = (torch.cat([scores, *extra], dim=-1) * SHAPE.head_dim**-0.5).softmax(-1)
        mixed = torch.einsum("bhqs,bshk->bqhk", weights[..., :length], first_v)
        for at, (_, value) in enumerate(own):
            mixed = mixed + weights[..., length + at].transpose(1, 2).unsqueeze(-1) * value
        out: Tensor = self.o_proj(mixed.flatten(2))
        return out


class Head(nn.Module):
    """The head, with the parameter names of its checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        size, eps = SHAPE.hidden_size, SHAPE.norm_eps
        self.fc = nn.Linear(len(LAYERS) * size, size, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": Attention(),
                "mlp": MLP(SHAPE),
                **{name: RMSNorm(size, eps) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
            }
        )
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, SHAPE.vocab_size, bias=False)

    def forward(self, embeddings: Tensor, hidden: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the stream [B, T, D] of entries with these embeddings [B, T, D] and hidden states [B, T, D]."""
        layer, length = self.midlayer, hidden.shape[1]
        cos, sin = (part[:length, None] for part in TABLE)
        both = torch.cat((layer["input_layernorm"](embeddings), layer["hidden_norm"](hidden)), dim=-1)
        stream = hidden + layer["self_attn"](both, earlier, (cos, sin))
        out: Tensor = stream + layer["mlp"](layer["post_attention_layernorm"](stream))
        return out


TABLE = rotary_table(SHAPE)


def losses(head: Head, model: transformers.PreTrainedModel, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Return, by depth, the loss and how often the head is right."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        seen = model(batch.ids, output_hidden_states=True)
        said = seen.logits.argmax(-1)  # [B, T] after each position
        embeddings = model.get_input_embeddings()(batch.ids[:, 1:]).float()
    states = torch.cat([seen.hidden_states[layer] for layer in LAYERS], dim=-1)[:, :-1].float()  # [B, T - 1, F]
    hidden, wanted, counts = head.fc(states), said[:, 1:], batch.has_loss[:, 1:]
    earlier: list[tuple[Tensor, Tensor]] = []
    results = []
    for _ in range(DEPTH):
        stream = head(embeddings, hidden, earlier)
        logits = head.lm_head(head.norm(stream[counts]))
        right = (logits.argmax(-1) == wanted[counts]).float().mean()
        results.append((F.cross_entropy(logits, wanted[counts]), right))
        hidden = F.pad(stream, (0, 0, 1, 0))[:, :-1]
    return results


def save(head: Head, folder: Path) -> None:
    """Write the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "vocab_size": SHAPE.vocab_size,
        "draft_vocab_size": SHAPE.vocab_size,
        "hidden_size": SHAPE.hidden_size,
        "intermediate_size": SHAPE.intermediate_size,
        "num_attention_heads": SHAPE.num_heads,
        "num_key_value_heads": SHAPE.num_heads,
        "head_dim": SHAPE.head_dim,
        "max_position_embeddings": SHAPE.max_positions,
        "rms_norm_eps": SHAPE.norm_eps,
        "rope_theta": SHAPE.rope_theta,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({name: tensor.bfloat16() for name, tensor in head.state_dict().items()}, folder / "model.safetensors")


def main() -> None:
    """Parse the command line, train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    packer, head = Packer(Tokenizer.from_file(str(BASE / "tokenizer.json")), seed=2), Head()
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP, (options.steps - step) / (options.steps / 2))
        results = losses(head, model, packer.batch(step, ROWS, LENGTH))
        loss = torch.stack([DISCOUNT**depth * loss for depth, (loss, _) in enumerate(results)]).sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no type for it
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            right = " ".join(f"{float(share):.0%}" for _, share in results)
            print(f"step {step}/{options.steps} right by depth: {right}, {time.process_time():.0f} core s", flush=True)
        if (step + 1) % SAVE_EVERY == 0:
            save(head, options.out)
    save(head, options.out)


if __name__ == "__main__":
    main()
