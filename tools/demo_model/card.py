"""Generates the model card from measured scores, so that its numbers always match the weights."""

from pathlib import Path

from tools.demo_model.score import mean

TASKS = {
    "add": "sums of up to three digits",
    "subtract": "differences of up to three digits, not below zero",
    "times": "products up to 12 * 12 (memorized, not held out)",
    "compare": "the larger or smaller of two numbers",
    "sort": "sorting two to six numbers below 100, up or down",
    "copy": "copying one to nine words, numbers or made-up strings (median 12 tokens, maximum 32)",
    "count": "counting, two to twelve numbers",
    "json": "a JSON record from a description",
    "lookup": "reading a field of a JSON record",
    "facts": "questions about Octavo, in phrasings not seen for that subject",
    "smalltalk": "greetings and the like (memorized, not held out)",
    "unknown": "declining questions it cannot answer",
    "recall": "a name, city or colour mentioned earlier in the chat",
    "tool_call": "the right tool call among one to three functions",
    "tool_answer": "answering from a tool's result",
}

CARD_PATH = Path(__file__).with_name("card.md")

Scores = dict[str, tuple[int, int]]


def card(direct: Scores, thinking: Scores, *, count: int, steps: int, minutes: float, date: str) -> str:
    """Return the text of the card for these scores."""
    rows = "\n".join(
        f"| {task} | {TASKS[task]} | {asked} | {right / asked:.1%} | {thinking[task][0] / thinking[task][1]:.1%} |"
        for task, (right, asked) in direct.items()
    )
    return CARD_PATH.read_text().format(
        count=count,
        steps=steps,
        millions=steps * 4096 / 1e6,
        minutes=minutes,
        date=f"on {date}" if date else "",
        rows=rows,
        direct=mean(direct),
        thinking=mean(thinking),
    )
