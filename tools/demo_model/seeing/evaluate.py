"""Score a checkpoint on held-out pictures, by Octavo itself, and write the scores to its model card.

python -m tools.demo_model.seeing.evaluate --checkpoint DIR [--count 200] [--card --minutes M --steps N --date D]
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tools.demo_model.seeing.held_out import Item, held_out
from tools.demo_model.seeing.questions import KNOWN, PHRASINGS, TASKS

from octavo import LLM, SamplingParams

CARD_PATH = Path(__file__).with_name("card.md")
PARAMS = SamplingParams(temperature=0, max_tokens=64)
ROWS = 32  # pictures of a training step

Scores = dict[str, tuple[int, int]]  # by task: correct, asked


def message(item: Item) -> dict[str, Any]:
    """Return the question as a message."""
    return {
        "role": "user",
        "content": [{"type": "image", "image": item.picture}, {"type": "text", "text": item.question.text}],
    }


def scores(llm: LLM, tasks: Sequence[str], count: int) -> Scores:
    """Ask `count` questions of each task."""
    found = {}
    for task in tasks:
        items = [*held_out(task, count)]
        outputs = llm.generate_multimodal([{"messages": [message(item)]} for item in items], PARAMS, use_tqdm=False)
        wrong = [
            f"{task}: {item.question.text} {item.question.answer!r} expected, {output.text!r} answered"
            for item, output in zip(items, outputs, strict=True)
            if output.text != item.question.answer
        ]
        print(*wrong[:4], sep="\n")
        found[task] = (len(items) - len(wrong), len(items))
    return found


def mean(found: Scores) -> float:
    """Return the mean accuracy over tasks."""
    return sum(right / asked for right, asked in found.values()) / len(found)


def card(found: Scores, llm: LLM, checkpoint: Path, options: argparse.Namespace) -> str:
    """Return the text of the card for these scores."""
    examples = {task: PHRASINGS[task][0].format(_SUBJECTS.get(task, "")) for task in found}
    rows = {
        task: f"| {task} | {examples[task]} | {asked} | {right / asked:.1%} |" for task, (right, asked) in found.items()
    }
    with safe_open(checkpoint / "model.safetensors", "np") as file:
        sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - no dict
    return CARD_PATH.read_text().format(
        millions=sum(math.prod(size) for size in sizes) / 1e6,
        vocabulary=llm.get_tokenizer().vocab_size,
        steps=options.steps,
        rows_per_step=ROWS,
        pictures=f"{options.steps * ROWS:,}",
        minutes=options.minutes,
        date=f"on {options.date}" if options.date else "",
        count=options.count,
        known="\n".join(rows[task] for task in KNOWN),
        mean=mean({task: found[task] for task in KNOWN}),
        overall=mean(found),
        others="\n".join(row for task, row in rows.items() if task not in KNOWN),
    )


_SUBJECTS = {
    "count": "red shapes",
    "colour": "circle",
    "shape": "red",
    "where": "blue star",
    "what": "at the top left",
    "exists": "a red circle",
}


def main() -> None:
    """Parse the command line, score, and write the card if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200, help="held-out pictures per task")
    parser.add_argument("--card", action="store_true", help="write README.md into the checkpoint folder")
    parser.add_argument("--minutes", type=float, default=0.0, help="core minutes of training, for the card")
    parser.add_argument("--steps", type=int, default=0, help="training steps, for the card")
    parser.add_argument("--date", default="", help="training date, for the card")
    options = parser.parse_args()
    llm = LLM(str(options.checkpoint), dtype="float32", num_kv_blocks=1024, block_size=16)
    found = scores(llm, TASKS, options.count)
    for task, (right, asked) in found.items():
        print(f"{task:>10} {right / asked:7.1%}")
    print(f"{'mean':>10} {mean(found):7.1%}")
    if options.card:
        (options.checkpoint / "README.md").write_text(card(found, llm, options.checkpoint, options))
    llm.exit()


if __name__ == "__main__":
    main()
