"""What every data generator yields: one exchange with one correct answer, and the rule for held-out items."""

import hashlib
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A short conversation whose last message is the only correct answer.

    `task` is the kind; `key` identifies the item in canonical form (a sum's operands in order), so that a held-out item
    is held out in every phrasing. `thought` is the reasoning shown in thinking mode.
    """

    task: str
    key: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thought: str = ""

    @property
    def is_held_out(self) -> bool:
        """Whether this item is excluded from training."""
        return is_held_out(self.task, self.key)


# Closed tasks: holding out a third of the 144 products would only show that a table must be memorized.
CLOSED_TASKS = frozenset({"times", "smalltalk"})
HELD_OUT_ONE_IN = {"facts": 8}
HELD_OUT_ONE_IN_DEFAULT = 20


def is_held_out(task: str, key: str) -> bool:
    """Return whether an item is held out. Decided by a hash, so it never changes between runs."""
    if task in CLOSED_TASKS or key.startswith("open:"):
        return False
    digest = hashlib.blake2b(f"{task}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN.get(task, HELD_OUT_ONE_IN_DEFAULT) == 0


def user(content: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Return an assistant message."""
    return {"role": "assistant", "content": content}


def exchange(task: str, key: str, question: str, answer: str, thought: str = "") -> Example:
    """Return an example with one question and one answer."""
    return Example(task=task, key=key, messages=(user(question), assistant(answer)), thought=thought)
