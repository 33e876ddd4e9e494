"""Score a checkpoint on held-out pictures, by Octavo itself, and write the scores to its model card.

python -m tools.demo_model.seeing.evaluate --checkpoint DIR [--count 200] [--seed 1]
python -m tools.demo_model.seeing.evaluate --checkpoint DIR --card --minutes M --steps N --date D
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tools.demo_model.seeing.held_out import SEED, Item, held_out
from tools.demo_model.seeing.questions import PHRASINGS, TASKS
from tools.demo_model.seeing.scenes import BROAD, SIMPLE, Range

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


def scores(
    llm: LLM, tasks: Sequence[str], count: int, within: Range = SIMPLE, *, redrawn: bool = False, seed: int = SEED
) -> Scores:
    """Ask `count` questions of each task."""
    found = {}
    for task in tasks:
        items = [*held_out(task, count, within, redrawn=redrawn, seed=seed)]
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


def table(columns: Sequence[Scores]) -> str:
    """Return the rows of the card's table: a task, an example, and the scores of each kind of picture."""
    shares = {task: [found[task][0] / found[task][1] for found in columns] for task in columns[0]}
    rows = [
        f"| {task} | {PHRASINGS[task][0].format(_SUBJECTS.get(task, ''))} | "
        + " | ".join(f"{share:.1%}" for share in of_task)
        + " |"
        for task, of_task in shares.items()
    ]
    means = " | ".join(f"**{mean(found):.1%}**" for found in columns)
    return "\n".join([*rows, f"| **mean** | | {means} |"])


def card(columns: Sequence[Scores], llm: LLM, checkpoint: Path, options: argparse.Namespace) -> str:
    """Return the text of the card for these scores."""
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
        asked=options.count * len(TASKS),
        seed=SEED,
        table=table(columns),
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
    parser.add_argument("--count", type=int, default=200, help="held-out pictures per task and column")
    parser.add_argument("--seed", type=int, default=SEED, help="of the pictures")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None, help="such as int8")
    parser.add_argument("--card", action="store_true", help="write README.md into the checkpoint folder")
    parser.add_argument("--minutes", type=float, default=0.0, help="core minutes of refining, for the card")
    parser.add_argument("--steps", type=int, default=0, help="steps of refining, for the card")
    parser.add_argument("--date", default="", help="date of refining, for the card")
    options = parser.parse_args()
    if options.card and (options.quantization is not None or options.seed != SEED):
        parser.error(f"--card: the card's scores are those without --quantization and with --seed {SEED}")
    llm = LLM(
        str(options.checkpoint),
        dtype=options.dtype,
        quantization=options.quantization,
        num_kv_blocks=1024,
        block_size=16,
    )
    columns = []
    for within in (SIMPLE, BROAD):
        for redrawn in (False, True):
            columns.append(scores(llm, TASKS, options.count, within, redrawn=redrawn, seed=options.seed))
            print(f"up to {within.things} things, redrawn: {redrawn}: {mean(columns[-1]):.1%}")
    print(table(columns))
    if options.card:
        (options.checkpoint / "README.md").write_text(card(columns, llm, options.checkpoint, options))
    llm.exit()


if __name__ == "__main__":
    main()
