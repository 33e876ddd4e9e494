"""Train the demo model that sees from scratch: pictures, tokenizer, weights, checkpoint.

    python -m tools.demo_model.seeing.train --out DIR [--steps N] [--threads 1]

The length is set in steps, so that runs are repeatable. A stopped run resumes from the state file in DIR.
"""

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tools.demo_model.run import Run
from tools.demo_model.seeing.batches import KINDS, Batches
from tools.demo_model.seeing.conversations import train_tokenizer
from tools.demo_model.seeing.model import Seeing, image_processor, save
from tools.demo_model.seeing.muon import Muon
from tools.demo_model.seeing.scenes import BROAD, COLOURS, HALF_ONE, MOSTLY_ONE, Range
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hyperparameters."""

    steps: int
    seed: int = 1
    rows: int = 32
    peak_rate: float = 3e-3
    warmup_steps: int = 100
    decay_share: float = 0.35  # of the steps: at the end, the rate falls to zero
    first_steps: int = 200  # with at most two things
    broad_steps: int = 300  # with up to four
    one_steps: int = 1200  # before which most pictures have one, and then half of them
    reading_weight: float = 0.5
    weight_decay: float = 0.05
    log_every: int = 25
    save_every: int = 100

    def within(self, step: int) -> Range:
        """Return what the pictures of a step may show."""
        if step < self.first_steps:
            return Range(things=2, numbers=BROAD.numbers)
        if step < self.broad_steps:
            return BROAD
        return MOSTLY_ONE if step < self.one_steps else HALF_ONE

    def rate(self, step: int) -> float:
        """Return the learning rate: warm-up, constant, decay to zero. Only the decay depends on the number of steps."""
        return self.peak_rate * min(
            1.0, (step + 1) / self.warmup_steps, (self.steps - step) / (self.decay_share * self.steps)
        )


class Training(Run):
    """The run: model, batches, and what is logged."""

    def __init__(self, plan: Plan, folder: Path, tokenizer: Tokenizer) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.tokenizer = plan, tokenizer
        self.model = Seeing(tokenizer, len(KINDS) + 1, len(COLOURS) + 1)
        super().__init__(folder, plan, self.model, make_optimizers(self.model, plan))
        self.graded: Counter[tuple[str, bool]] = Counter()  # answers since the last line of the log
        self.batches = Batches(tokenizer, image_processor(tokenizer), plan.seed, plan.rows)

    def train_step(self) -> dict[str, float]:
        """Run one step and return what is worth logging."""
        batch = self.batches.batch(self.step, self.plan.within(self.step))
        logits, read = self.model(batch)
        answers = batch.answers[batch.answers > 0] - 1  # [N]
        targets = batch.targets[batch.answers > 0]
        # All answers count the same, however long they are.
        loss = (F.cross_entropy(logits, targets, reduction="none") / answers.bincount()[answers]).sum() / len(
            batch.tasks
        )
        self.graded.update(zip(batch.tasks, _are_right(logits, targets, answers), strict=True))
        figures = {"loss": loss.item()}
        for name, output, wanted in zip(
            ("reads-kind", "reads-colour", "reads-place"), read, batch.seen.T, strict=False
        ):
            reading = F.cross_entropy(output, wanted)
            loss = loss + self.plan.reading_weight * reading
            figures[name] = reading.item()
        self.learn(loss)
        return figures

    def train(self) -> None:
        """Run the remaining steps."""
        while self.step < self.plan.steps:
            begin = time.process_time()
            figures = self.train_step()
            self.core_seconds += time.process_time() - begin
            if self.step % self.plan.log_every == 0:
                minutes = self.core_seconds / 60
                told = " ".join(f"{name} {value:.3f}" for name, value in (figures | self._grades()).items())
                print(f"step {self.step}/{self.plan.steps} {told} {minutes:.1f} core minutes", flush=True)
            if self.step % self.plan.save_every == 0:
                self.save_state()

    def _grades(self) -> dict[str, float]:
        """Return the share of right answers since the last call, by task."""
        tasks = sorted({task for task, _ in self.graded})
        shares = {
            task: self.graded[task, True] / (self.graded[task, True] + self.graded[task, False]) for task in tasks
        }
        self.graded.clear()
        return shares

    def finish(self) -> None:
        """Write the checkpoint."""
        self.save_state()
        save(self.model, self.tokenizer, self.folder)
        print(f"{self.step} steps in {self.core_seconds / 60:.1f} core minutes, written to {self.folder}")


def _are_right(logits: Tensor, targets: Tensor, answers: Tensor) -> list[bool]:
    """Return for each answer whether all of its tokens are the likeliest."""
    wrong = (logits.argmax(-1) != targets).long()
    return [not count for count in torch.zeros(int(answers.max()) + 1).long().scatter_add(0, answers, wrong).tolist()]


def make_optimizers(model: Seeing, plan: Plan) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of the layers, AdamW for the rest; see `tools.demo_model.train.make_optimizers`."""
    inner = model.network.model
    layers = [*inner.language_model.layers.parameters(), *inner.visual.blocks.parameters()]
    layers += [*inner.visual.merger.parameters()]
    matrices = [weight for weight in layers if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in chosen]
    muon = Muon(matrices, lr=plan.peak_rate, weight_decay=plan.weight_decay)
    return muon, torch.optim.AdamW(rest, lr=plan.peak_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def tokenizer_in(folder: Path, seed: int) -> Tokenizer:
    """Return the tokenizer of the run in a folder: the first time, a new one."""
    path = folder / "tokenizer.json"
    if not path.exists():
        train_tokenizer(seed).save(str(path))
    return Tokenizer.from_file(str(path))


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the state file and the checkpoint")
    parser.add_argument("--steps", type=int, default=3700)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(steps=options.steps)
    run = Training(plan, options.out, tokenizer_in(options.out, plan.seed))
    run.load_state()
    run.train()
    run.finish()


if __name__ == "__main__":
    main()
