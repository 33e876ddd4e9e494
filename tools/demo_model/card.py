"""The model card, written from the measured scores so that its numbers cannot drift from the weights."""

from pathlib import Path

from tools.demo_model.score import mean

TASKS = {
    "add": "sums of up to three digits",
    "subtract": "differences of up to three digits, not below zero",
    "times": "products up to 12 * 12 (learnt by heart, not held out)",
    "compare": "the larger or smaller of two numbers",
    "sort": "sorting two to six numbers below 100, up or down",
    "copy": "copying one to nine words, numbers or made-up strings (12 tokens in the median, 32 at most)",
    "count": "counting over two to twelve numbers",
    "json": "a JSON record from a description",
    "lookup": "a field read from a JSON record",
    "facts": "questions about Octavo, in wordings not seen for that subject",
    "smalltalk": "greetings and the like (learnt by heart, not held out)",
    "unknown": "questions it cannot answer, and saying so",
    "recall": "a name, city or colour told earlier in the chat",
    "tool_call": "the right tool call among one to three functions",
    "tool_answer": "telling a tool's result",
}

CARD_PATH = Path(__file__).with_name("card.md")

Scores = dict[str, tuple[int, int]]


def card(direct: Scores, thinking: Scores, *, count: int, steps: int, minutes: float, date: str) -> str:
    """The card's text for these scores."""
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
