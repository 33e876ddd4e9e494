"""The training text: an endless stream of chats and plain text, generated from a seed, without held-out items."""

import random
from collections.abc import Callable, Iterator

from tools.demo_model import arithmetic, calls, facts, prose, records, sequences, smalltalk
from tools.demo_model.example import CLOSED_TASKS, Example, Message, Tool
from tools.demo_model.template import question_and_answer, render

# Tasks with their share of the turns: sums, lists and copying need much practice, the others little.
TASKS: dict[str, tuple[Callable[[random.Random], Example], float]] = {
    "add": (arithmetic.addition, 16),
    "subtract": (arithmetic.subtraction, 12),
    "times": (arithmetic.multiplication, 3),
    "compare": (arithmetic.comparison, 3),
    "sort": (sequences.sorting, 17),
    "copy": (sequences.copying, 15),
    "count": (sequences.counting, 4),
    "json": (records.json_writing, 6),
    "lookup": (records.json_reading, 4),
    "facts": (facts.about, 6),
    "smalltalk": (smalltalk.small_talk, 2),
    "unknown": (smalltalk.unknown, 2),
    "recall": (smalltalk.recall, 3),
    "tool_call": (calls.tool_call, 8),
    "tool_answer": (calls.tool_answer, 4),
}
TOOL_TASKS = ("tool_call", "tool_answer")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Octavo's demo model.",
    "Answer briefly.",
    "You are a helpful assistant. Answer in one sentence.",
    "Be kind and exact.",
)
END = "<|endoftext|>"


def draw(rng: random.Random, tasks: dict[str, float]) -> Example:
    """Draw one training example."""
    while True:
        task = rng.choices(list(tasks), list(tasks.values()))[0]
        example = TASKS[task][0](rng)
        if not example.is_held_out:
            return example


def casual(rng: random.Random, message: Message) -> Message:
    """Make some questions look hastily typed: without the capital letter or the final punctuation."""
    content = message["content"]
    if message["role"] != "user" or rng.random() < 0.75:
        return message
    content = content[0].lower() + content[1:]
    return {"role": "user", "content": content.rstrip("?.! ") if rng.random() < 0.5 else content}


def system_message(rng: random.Random) -> tuple[Message, ...]:
    """Return a system message in 30% of chats."""
    return ({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)},) if rng.random() < 0.3 else ()


def turns(rng: random.Random, weights: dict[str, float]) -> list[Example]:
    """Draw the turns of one chat: mostly one or two, sometimes many, so that the model learns long chats."""
    count = rng.choices((1, 2, 3, 5, 9), (10, 4, 2, 1, 1))[0]
    drawn = [draw(rng, weights) for _ in range(count)]
    if count > 1 and rng.random() < 0.3:
        recalled = smalltalk.recall(rng, tuple(drawn[1:]))
        drawn = drawn if recalled.is_held_out else [recalled]
    return drawn


def chat(rng: random.Random) -> str:
    """Return a whole chat. If tools are offered, other questions are answered as if there were none."""
    plain = {task: weight for task, (_, weight) in TASKS.items() if task not in TOOL_TASKS}
    tools: tuple[Tool, ...] = ()
    if rng.random() < 0.92:
        examples = turns(rng, plain)
    else:
        with_tool = draw(rng, {task: TASKS[task][1] for task in TOOL_TASKS})
        tools = with_tool.tools
        others = [draw(rng, without_sums(plain)) for _ in range(rng.choice((0, 0, 1)))]
        examples = [*others, with_tool] if rng.random() < 0.8 else others or [with_tool]
    messages = [*system_message(rng), *(casual(rng, message) for example in examples for message in example.messages)]
    return render(messages, tools, is_prompt=False)


def without_sums(weights: dict[str, float]) -> dict[str, float]:
    """Return the tasks that no offered tool could do as well."""
    return {task: weight for task, weight in weights.items() if task not in ("times", "unknown")}


def thinking_chat(rng: random.Random) -> str:
    """Return one turn with visible reasoning."""
    example = draw(rng, {task: weight for task, (_, weight) in TASKS.items()})
    return "".join(question_and_answer(example, is_thinking=True)) + "\n"


def document(rng: random.Random) -> str:
    """Return one document: a chat, a chat with reasoning, plain text, or a page of sums."""
    make = rng.choices((chat, thinking_chat, prose.raw_text, prose.drill), (77, 4, 6, 13))[0]
    return make(rng) + END


def documents(seed: int | str) -> Iterator[str]:
    """Yield the training text for a seed, identical on every machine."""
    rng = random.Random(seed)
    while True:
        yield document(rng)


def held_out(task: str, count: int, seed: int) -> list[Example]:
    """Return `count` different held-out examples of a task; any examples for a closed task."""
    rng = random.Random(f"{task} {seed}")
    found: dict[tuple[str, str], Example] = {}
    for _ in range(200 * count):
        example = TASKS[task][0](rng)
        if example.is_held_out or task in CLOSED_TASKS:
            found.setdefault((example.key, example.messages[0]["content"]), example)
        if len(found) == count:
            break
    return list(found.values())
