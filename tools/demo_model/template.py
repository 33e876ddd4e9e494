"""The chat template, rendered as an engine will render it: one text for training and for use."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tools.demo_model.example import Example, Message, Tool

TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")


def refuse(message: str) -> None:
    """What a template calls on messages that it cannot write. Raises ValueError."""
    raise ValueError(message)


@functools.cache
def compiled() -> Template:
    """The template, compiled with the settings that chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(TEMPLATE_PATH.read_text())


def render(
    messages: Sequence[Message], tools: Sequence[Tool] = (), *, is_prompt: bool, is_thinking: bool = False
) -> str:
    """The conversation as text; `is_prompt` opens the assistant's next message."""
    return compiled().render(
        messages=messages, tools=tools, add_generation_prompt=is_prompt, enable_thinking=is_thinking
    )


def question_and_answer(example: Example, *, is_thinking: bool = False) -> tuple[str, str]:
    """The prompt that an engine would be given, and the rest that the model should write, end mark included."""
    prompt = render(example.messages[:-1], example.tools, is_prompt=True, is_thinking=is_thinking)
    answer = f"{example.messages[-1]['content']}<|im_end|>"
    return prompt, f"{example.thought}\n</think>\n\n{answer}" if is_thinking else answer
