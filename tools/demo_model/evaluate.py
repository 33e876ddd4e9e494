"""Score a checkpoint on held-out items and write the scores to its model card.

python tools/demo_model/evaluate.py --checkpoint DIR [--count 500] [--card --minutes M --steps N --date D]
"""

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.demo_model.card import card
from tools.demo_model.checkpoint import load_checkpoint
from tools.demo_model.score import in_words, scores


def main() -> None:
    """Parse the command line, score, and write the card if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--count", type=int, default=500, help="held-out questions per task")
    parser.add_argument("--card", action="store_true", help="write README.md into the checkpoint folder")
    parser.add_argument("--minutes", type=float, default=0.0, help="core minutes of training, for the card")
    parser.add_argument("--steps", type=int, default=0, help="training steps, for the card")
    parser.add_argument("--date", default="", help="training date, for the card")
    options = parser.parse_args()
    torch.set_num_threads(2)
    model = load_checkpoint(options.checkpoint)
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    direct = scores(model, tokenizer, options.count)
    print("direct   ", in_words(direct))
    thinking = scores(model, tokenizer, options.count // 2, is_thinking=True)
    print("thinking ", in_words(thinking))
    if options.card:
        text = card(
            direct, thinking, count=options.count, steps=options.steps, minutes=options.minutes, date=options.date
        )
        (options.checkpoint / "README.md").write_text(text)


if __name__ == "__main__":
    main()
