"""The chat template, rendered as an engine renders it, so that training and inference see the same text."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tools.demo_model.example import Example, Message, Tool

TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")


def refuse(message: str) -> None:
    """`raise_exception` for templates. Raises ValueError."""
    raise ValueError(message)


@functools.cache
def compiled() -> Template:
    """Return the template, compiled with the usual settings of chat templates."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(TEMPLATE_PATH.read_text())


def render(
    messages: Sequence[Message], tools: Sequence[Tool] = (), *, is_prompt: bool, is_thinking: bool = False
) -> str:
    """Return the conversation as text; `is_prompt` opens the assistant's next message."""
    return compiled().render(
        messages=messages, tools=tools, add_generation_prompt=is_prompt, enable_thinking=is_thinking
    )


def question_and_answer(example: Example, *, is_thinking: bool = False) -> tuple[str, str]:
    """Return the prompt as an engine would see it, and the expected completion with the end token."""
    prompt = render(example.messages[:-1], example.tools, is_prompt=True, is_thinking=is_thinking)
    answer = f"{example.messages[-1]['content']}<|im_end|>"
    return prompt, f"{example.thought}\n</think>\n\n{answer}" if is_thinking else answer
