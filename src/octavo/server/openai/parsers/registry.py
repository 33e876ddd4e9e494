"""Supported formats, by their names in `--tool-call-parser` and `--reasoning-parser`.

A chat template reveals a model's format: it renders earlier calls as the model was trained to write them. Unsupported
formats are listed, too, so that they are not mistaken for supported ones.
"""

from collections.abc import Mapping
from typing import TypeVar

from octavo.errors import UnknownOptionError
from octavo.server.openai.parsers.hermes import HermesParser
from octavo.server.openai.parsers.llama3_json import Llama3JsonParser
from octavo.server.openai.parsers.mistral import MistralArgsParser, MistralParser
from octavo.server.openai.parsers.pythonic import PythonicParser
from octavo.server.openai.parsers.qwen3_coder import Qwen3CoderParser
from octavo.server.openai.parsers.reasoning import ReasoningFormat
from octavo.server.openai.parsers.tool_calls import ToolCallParser

T = TypeVar("T")

AUTO, NONE = "auto", "none"  # detected from the chat template; no parser

TOOL_CALL_PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "mistral_args": MistralArgsParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat(begin="<think>", end="</think>"),
    "qwen3": ReasoningFormat(begin="<think>", end="</think>"),
    "deepseek_r1": ReasoningFormat(begin="<think>", end="</think>", always_starts_inside=True),
    "mistral": ReasoningFormat(begin="[THINK]", end="[/THINK]"),
}

# The first entry that matches wins: all of its markers must be in the template.
_TOOL_CALL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (NONE, ("<arg_key>",)),  # GLM
    (NONE, ("<tool_call>", "<tool_sep>")),  # Hunyuan
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("[func_name1(",)),  # Llama 3.2 and 4, on request
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("llama3_json", ("<|header_start|>", '"parameters"')),  # Llama 4
    ("pythonic", ("<|python_start|>",)),  # Llama 4
    ("pythonic", ("<|tool_call_start|>",)),  # LFM2
)

_REASONING_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("think", ("<think>",)),
    ("think", ("</think>",)),  # drops earlier reasoning; the model opens its own
    ("mistral", ("[THINK]",)),
)


def tool_call_parser(name: str) -> type[ToolCallParser] | None:
    """Return the parser named `name`; None for `none`.

    Raises:
        UnknownOptionError: the message suggests the closest name.
    """
    return _look_up("tool call parser", name, TOOL_CALL_PARSERS)


def reasoning_format(name: str) -> ReasoningFormat | None:
    """Return the format named `name`; None for `none`. Raises as `tool_call_parser`."""
    return _look_up("reasoning parser", name, REASONING_FORMATS)


def detect_tool_call_parser(template: str) -> str:
    """Return the name of the tool call parser for models with this chat template; `none` if there is none."""
    return _first_fitting(template, _TOOL_CALL_SIGNS)


def detect_reasoning_parser(template: str) -> str:
    """Return the name of the reasoning parser for models with this chat template; `none` if there is none."""
    return _first_fitting(template, _REASONING_SIGNS)


def _look_up(kind: str, name: str, known: Mapping[str, T]) -> T | None:
    if name not in (NONE, *known):
        raise UnknownOptionError(kind, name, (AUTO, NONE, *known))
    return known.get(name)


def _first_fitting(template: str, signs: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    return next((name for name, marks in signs if all(mark in template for mark in marks)), NONE)
