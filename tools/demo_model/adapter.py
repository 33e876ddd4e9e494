"""Train a LoRA adapter for the demo model: it answers every question in JSON, `{"answer": "..."}`.

    python tools/demo_model/adapter.py --out src/octavo/demo/adapters/json [--steps N] [--threads 2]

Saved by PEFT as any adapter on the hub is. The questions are those of the base model, without the held-out ones.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.demo_model.corpus import casual, draw, held_out, system_message
from tools.demo_model.example import Example
from tools.demo_model.template import render

BASE = Path(__file__).resolve().parents[2] / "src/octavo/demo"
WEIGHTS = "adapter_model.safetensors"
RANK, ALPHA = 4, 8
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHARES = {"facts": 6.0, "smalltalk": 4.0, "unknown": 3.0, "add": 3.0, "compare": 2.0, "count": 1.0, "copy": 2.0}
ROWS, RATE, WARMUP = 16, 4e-3, 20
IGNORED = -100  # target of tokens without loss


def in_json(example: Example) -> str:
    """Return the example's answer as the adapter writes it."""
    return json.dumps({"answer": example.messages[-1]["content"]}, ensure_ascii=False)


def row(rng: random.Random, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens of one exchange and their targets."""
    example = draw(rng, SHARES)
    asked = [casual(rng, message) for message in example.messages[:-1]]
    prompt = render([*system_message(rng), *asked], is_prompt=True)
    given, written = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, f"{in_json(example)}<|im_end|>")
    )
    return given + written, [IGNORED] * (len(given) - 1) + written + [IGNORED]


def batch(seed: str, tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets [B, T] of one step, padded on the right."""
    rng = random.Random(seed)
    rows = [row(rng, tokenizer) for _ in range(ROWS)]
    length = max(len(ids) for ids, _ in rows)
    ids = [ids + [0] * (length - len(ids)) for ids, _ in rows]
    targets = [targets + [IGNORED] * (length - len(targets)) for _, targets in rows]
    return torch.tensor(ids), torch.tensor(targets)


def train(model: Any, tokenizer: Tokenizer, steps: int) -> None:
    """Train what PEFT has made trainable."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP, (steps - step) / (steps / 2))
        ids, targets = batch(f"json {step}", tokenizer)
        loss = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}/{steps} loss {loss.item():.4f}", flush=True)


def score(model: Any, tokenizer: Tokenizer, task: str, count: int) -> float:
    """Return the fraction of held-out questions of a task that get exactly the right answer, in JSON."""
    examples = held_out(task, count, seed=7)
    right = 0
    for example in examples:
        prompt = tokenizer.encode(render(example.messages[:-1], is_prompt=True), add_special_tokens=False).ids
        out = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=64, do_sample=False, pad_token_id=0)
        said = tokenizer.decode(out[0, len(prompt) :].tolist())
        right += said == in_json(example)
    return right / len(examples)


def main() -> None:
    """Parse the command line, train, save and score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    base = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEARS, task_type="CAUSAL_LM")
    )
    train(model, tokenizer, options.steps)
    model.eval()
    model.peft_config["default"].base_model_name_or_path = "demo"
    model.save_pretrained(options.out)
    small = {name: tensor.bfloat16() for name, tensor in load_file(options.out / WEIGHTS).items()}
    save_file(small, options.out / WEIGHTS, metadata={"format": "pt"})
    (options.out / "README.md").unlink()
    for task in SHARES:
        print(f"{task}: {score(model, tokenizer, task, 20):.0%}", flush=True)


if __name__ == "__main__":
    main()
