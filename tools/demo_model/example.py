"""What every data generator yields: one exchange with one right answer, and the rule that holds some of them out."""

import hashlib
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A short conversation whose last message is the assistant's one right answer.

    `task` names the kind; `key` names the item in a canonical form (a sum's operands in order), so that an item
    held out is held out in every wording. `thought` is a worked step that is shown when thinking is asked for.
    """

    task: str
    key: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thought: str = ""

    @property
    def is_held_out(self) -> bool:
        """Whether training must never see this item."""
        return is_held_out(self.task, self.key)


# Whoever holds out a third of the 144 products only learns that tables are learnt by heart: such tasks are closed.
CLOSED_TASKS = frozenset({"times", "smalltalk"})
HELD_OUT_ONE_IN = {"facts": 8}
HELD_OUT_ONE_IN_DEFAULT = 20


def is_held_out(task: str, key: str) -> bool:
    """Whether the item belongs to the held-out part: decided by a hash, so by nothing that training can change."""
    if task in CLOSED_TASKS or key.startswith("open:"):
        return False
    digest = hashlib.blake2b(f"{task}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN.get(task, HELD_OUT_ONE_IN_DEFAULT) == 0


def user(content: str) -> Message:
    """A message from the user."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """A message from the model."""
    return {"role": "assistant", "content": content}


def exchange(task: str, key: str, question: str, answer: str, thought: str = "") -> Example:
    """One question, one answer."""
    return Example(task=task, key=key, messages=(user(question), assistant(answer)), thought=thought)
