"""Sums, differences, products and comparisons: several phrasings of the question, one form of the answer."""

import random

from tools.demo_model.example import Example, exchange

ASKED = (
    "What is {}?",
    "{}",
    "{} =",
    "{} = ?",
    "Calculate {}.",
    "Please calculate {}.",
    "How much is {}?",
    "Compute {}",
    "what's {}",
    "Can you work out {}?",
    "Tell me {}.",
)
SUM_IN_WORDS = (
    "Add {} and {}.",
    "What is {} plus {}?",
    "What is the sum of {} and {}?",
    "What do you get if you add {} to {}?",
)
DIFFERENCE_IN_WORDS = ("What is {} minus {}?", "What is the difference between {} and {}?", "How much is {} minus {}?")
PRODUCT_IN_WORDS = ("What is {} times {}?", "Multiply {} by {}.", "What is the product of {} and {}?")
PLACES = ("ones", "tens", "hundreds")


def operand(rng: random.Random) -> int:
    """Return a number of one to three digits; longer ones are more frequent, as there are more of them."""
    return rng.randrange(rng.choice((10, 100, 100, 1000, 1000, 1000)))


def wording(rng: random.Random, a: int, sign: str, b: int, in_words: tuple[str, ...]) -> str:
    """Return the question, with an operator or in words."""
    if rng.random() < 0.35:
        return rng.choice(in_words).format(a, b)
    gap = "" if rng.random() < 0.3 else " "
    return rng.choice(ASKED).format(f"{a}{gap}{sign}{gap}{b}")


def sum_steps(a: int, b: int) -> str:
    """Return the sum column by column, as on paper: the reasoning shown in thinking mode."""
    steps, carry = [], 0
    for place in PLACES[: len(str(max(a, b)))]:
        left, right = a % 10, b % 10
        column = f"{left} + {right}" + (" + 1" if carry else "")
        total = left + right + carry
        steps.append(f"{place}: {column} = {total}")
        a, b, carry = a // 10, b // 10, total // 10
    return "\n".join(steps)


def addition(rng: random.Random) -> Example:
    """`a + b` with up to three digits; sums of two numbers below 20 are always in the training set."""
    a, b = operand(rng), operand(rng)
    key = f"{min(a, b)}+{max(a, b)}"
    if max(a, b) < 20:
        key = "open:" + key
    return exchange("add", key, wording(rng, a, "+", b, SUM_IN_WORDS), f"{a} + {b} = {a + b}", sum_steps(a, b))


def subtraction(rng: random.Random) -> Example:
    """`a - b` with up to three digits and a result of at least zero."""
    b, a = sorted((operand(rng), operand(rng)))
    key = f"{a}-{b}"
    if a < 20:
        key = "open:" + key
    thought = f"{a} is not less than {b}, so take {b} from {a}."
    return exchange("subtract", key, wording(rng, a, "-", b, DIFFERENCE_IN_WORDS), f"{a} - {b} = {a - b}", thought)


def multiplication(rng: random.Random) -> Example:
    """The multiplication table up to 12 times 12: memorized, so nothing is held out."""
    a, b = rng.randrange(13), rng.randrange(13)
    question = wording(rng, a, rng.choice("*x"), b, PRODUCT_IN_WORDS)
    return exchange("times", f"{a}*{b}", question, f"{a} * {b} = {a * b}", "This is in the table up to twelve.")


def comparison(rng: random.Random) -> Example:
    """Which of two different numbers is larger or smaller."""
    a = operand(rng)
    b = operand(rng)
    while b == a:
        b = operand(rng)
    word, first = rng.choice((("larger", max(a, b)), ("smaller", min(a, b))))
    question = rng.choice(("Which is {0}, {1} or {2}?", "Which number is {0}: {1} or {2}?", "Is {1} or {2} {0}?"))
    other = a + b - first
    answer = f"{first} is {word} than {other}."
    key = f"{word} {min(a, b)} {max(a, b)}"
    return exchange("compare", key, question.format(word, a, b), answer, "Compare the lengths, then the digits.")
