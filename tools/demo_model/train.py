"""Train the demo model from scratch: text, tokenizer, weights, checkpoint.

    python tools/demo_model/train.py --out DIR [--steps N] [--threads 2]

The length is set in steps, not minutes, so that runs are repeatable. A stopped run resumes from the state file in DIR.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.demo_model.batches import Packer
from tools.demo_model.bpe import save_tokenizer, token_id, train_tokenizer
from tools.demo_model.checkpoint import save_checkpoint
from tools.demo_model.qwen3 import Qwen3, Shape
from tools.demo_model.run import Run
from tools.demo_model.score import in_words, scores


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hyperparameters. Rows are short, with some long ones near the end; tokens per step are constant."""

    steps: int
    seed: int = 1
    tokens_per_step: int = 4096
    short_row: int = 512
    long_row: int = 2048
    long_every: int = 10
    peak_rate: float = 2e-3
    warmup_steps: int = 150
    decay_steps: int = 400
    last_steps: int = 300
    last_share: float = 0.4
    weight_decay: float = 0.1
    log_every: int = 50
    save_every: int = 100
    score_every: int = 500

    def row_length(self, step: int) -> int:
        """Return the row length of a step: long rows are expensive, so they come late and rarely."""
        is_late = step >= self.steps - self.last_steps - self.decay_steps
        return self.long_row if is_late and step % self.long_every == 0 else self.short_row

    def rate(self, step: int) -> float:
        """Return the learning rate: warm-up, constant, decay to zero, and a second decay from a lower peak, all linear.

        Only the decays depend on the number of steps, so that number may be changed during the constant phase.
        """
        left = self.steps - step
        if left <= self.last_steps:
            return self.peak_rate * self.last_share * left / self.last_steps
        return self.peak_rate * min(1.0, (step + 1) / self.warmup_steps, (left - self.last_steps) / self.decay_steps)


class Training(Run):
    """The run: model, batches, and what is logged."""

    def __init__(self, plan: Plan, folder: Path, tokenizer: Tokenizer) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.tokenizer = plan, tokenizer
        self.model = Qwen3(Shape(vocab_size=tokenizer.get_vocab_size()))
        super().__init__(folder, plan, self.model, make_optimizers(self.model, plan))
        self.hidden = torch.compile(self.model.hidden, dynamic=False)  # halves the time of a step
        self.packer = Packer(tokenizer, plan.seed)

    def train_step(self) -> float:
        """Run one step and return its loss."""
        length = self.plan.row_length(self.step)
        batch = self.packer.batch(self.step, self.plan.tokens_per_step // length, length)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.hidden(batch.ids)[batch.has_loss]  # [N, D]
            loss = F.cross_entropy(self.model.logits(hidden).float(), batch.targets[batch.has_loss])
        self.learn(loss)
        return loss.item()

    def train(self) -> None:
        """Run the remaining steps."""
        while self.step < self.plan.steps:
            begin = time.process_time()
            loss = self.train_step()
            self.core_seconds += time.process_time() - begin
            if self.step % self.plan.log_every == 0:
                minutes = self.core_seconds / 60
                print(f"step {self.step}/{self.plan.steps} loss {loss:.4f} {minutes:.1f} core minutes", flush=True)
            if self.step % self.plan.save_every == 0:
                self.save_state()
            if self.step % self.plan.score_every == 0:
                self.report()

    def report(self) -> None:
        """Log a quick score on some held-out questions."""
        with torch.autocast("cpu", torch.bfloat16):
            print(in_words(scores(self.model, self.tokenizer, 50)), flush=True)

    def finish(self) -> None:
        """Write the checkpoint."""
        end_of_turn, end_of_text = (token_id(self.tokenizer, mark) for mark in ("<|im_end|>", "<|endoftext|>"))
        save_checkpoint(self.model, end_of_turn, end_of_text, self.folder)
        print(f"{self.step} steps in {self.core_seconds / 60:.1f} core minutes, written to {self.folder}")


def make_optimizers(model: Qwen3, plan: Plan) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of the layers, AdamW for embedding and norms.

    Muon (Jordan, 2024) orthogonalizes each matrix's update. Scaled to AdamW's root mean square, it uses the same
    learning rate.
    """
    matrices = [weight for weight in model.layers.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    muon = torch.optim.Muon(
        matrices, lr=plan.peak_rate, weight_decay=plan.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    rest = [model.embed_tokens.weight, *vectors]
    return muon, torch.optim.AdamW(rest, lr=plan.peak_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the state file and the checkpoint")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(steps=options.steps)
    save_tokenizer(train_tokenizer(plan.seed), options.out)
    run = Training(plan, options.out, Tokenizer.from_file(str(options.out / "tokenizer.json")))
    run.load_state()
    run.train()
    run.finish()


if __name__ == "__main__":
    main()
