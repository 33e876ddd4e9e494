"""Train the demo model that sees from scratch: pictures, tokenizer, weights, checkpoint.

    python -m tools.demo_model.seeing.train --out DIR [--steps N] [--threads 1]
    python -m tools.demo_model.seeing.train --out DIR --from CHECKPOINT [--steps N]

The second form refines a checkpoint: most pictures have three or four shapes, and each question is asked as if it were
the first. The length is set in steps, so that runs are repeatable. A stopped run resumes from the state file in DIR,
which has the checkpoint as of that step, too.
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
from tools.demo_model.seeing.conversations import APART, MIXED, Asking, train_tokenizer
from tools.demo_model.seeing.model import Seeing, image_processor, save
from tools.demo_model.seeing.muon import Muon
from tools.demo_model.seeing.scenes import BROAD, COLOURS, CROWDED, HALF_ONE, MOSTLY_ONE, Range
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hyperparameters."""

    steps: int
    seed: int = 1
    rows: int = 32
    blind_every: int = 16  # steps: one has no pictures
    peak_rate: float = 3e-3
    warmup_steps: int = 100
    decay_share: float = 0.35  # of the steps: at the end, the rate falls to zero
    first_steps: int = 200  # with at most two things
    broad_steps: int = 300  # with up to four
    one_steps: int = 1200  # before which most pictures have one
    pictures: Range = HALF_ONE  # then
    conversations_every: int = 1  # steps: one has conversations; in the others, questions do not see those before them
    reading_weight: float = 0.5  # of what the linears read
    length_power: float = 1.0  # an answer's tokens count as one, divided by this power of their number
    weight_decay: float = 0.05
    log_every: int = 25
    save_every: int = 100

    @classmethod
    def refining(cls, steps: int) -> "Plan":
        """Return the plan of a run that starts from a checkpoint."""
        return cls(
            steps=steps,
            seed=2,
            blind_every=8,  # rarer, it forgets to ask for a picture
            peak_rate=2e-3,
            warmup_steps=50,
            decay_share=0.7,
            first_steps=0,
            broad_steps=0,
            one_steps=0,
            pictures=CROWDED,
            conversations_every=8,
            reading_weight=0.0,  # the linears are in no checkpoint; what new ones ask of the tower is noise at first
            length_power=0.5,
            save_every=50,
        )

    def within(self, step: int) -> Range:
        """Return what the pictures of a step may show."""
        if step < self.first_steps:
            return Range(things=2, numbers=BROAD.numbers)
        if step < self.broad_steps:
            return BROAD
        return MOSTLY_ONE if step < self.one_steps else self.pictures

    def asking(self, step: int) -> Asking:
        """Return what is asked about the pictures of a step."""
        return MIXED if step % self.conversations_every == 0 else APART

    def rate(self, step: int) -> float:
        """Return the learning rate: warm-up, constant, decay to zero. Only the decay depends on the number of steps."""
        return self.peak_rate * min(
            1.0, (step + 1) / self.warmup_steps, (self.steps - step) / (self.decay_share * self.steps)
        )


class Training(Run):
    """The run: model, batches, and what is logged."""

    def __init__(self, plan: Plan, folder: Path, tokenizer: Tokenizer, checkpoint: Path | None = None) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.tokenizer = plan, tokenizer
        self.model = Seeing(tokenizer, len(KINDS) + 1, len(COLOURS) + 1)
        if checkpoint is not None:
            self.model.load(checkpoint)
        super().__init__(folder, plan, self.model, make_optimizers(self.model, plan))
        self.graded: Counter[tuple[str, bool]] = Counter()  # answers since the last line of the log
        self.batches = Batches(tokenizer, image_processor(tokenizer), plan.seed, plan.rows, plan.blind_every)

    def train_step(self) -> dict[str, float]:
        """Run one step and return what is worth logging."""
        batch = self.batches.batch(self.step, self.plan.within(self.step), self.plan.asking(self.step))
        logits, read = self.model(batch)
        answers = batch.answers[batch.answers > 0] - 1  # [N]
        targets = batch.targets[batch.answers > 0]
        # At a power of one, all answers count the same, however long they are.
        weights = answers.bincount()[answers].float() ** -self.plan.length_power
        loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / len(batch.tasks)
        self.graded.update(zip(batch.tasks, _are_right(logits, targets, answers), strict=True))
        figures = {"loss": loss.item()}
        names = ("reads-kind", "reads-colour", "reads-place") if self.plan.reading_weight else ()
        for name, output, wanted in zip(names, read, batch.seen.T, strict=False):
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
                save(self.model, self.tokenizer, self.folder)

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


def tokenizer_in(folder: Path, seed: int, checkpoint: Path | None) -> Tokenizer:
    """Return the tokenizer of the run in a folder: the first time, the checkpoint's or a new one."""
    path = folder / "tokenizer.json"
    if not path.exists():
        known = train_tokenizer(seed) if checkpoint is None else Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        known.save(str(path))
    return Tokenizer.from_file(str(path))


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the state file and the checkpoint")
    parser.add_argument("--from", type=Path, dest="checkpoint", help="refine this checkpoint instead of a new model")
    parser.add_argument("--steps", type=int, default=3700)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(steps=options.steps) if options.checkpoint is None else Plan.refining(options.steps)
    tokenizer = tokenizer_in(options.out, plan.seed, options.checkpoint)
    run = Training(plan, options.out, tokenizer, options.checkpoint)
    run.load_state()
    run.train()
    run.finish()


if __name__ == "__main__":
    main()
