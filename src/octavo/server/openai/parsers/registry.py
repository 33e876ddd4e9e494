"""The formats that Octavo reads, by the names that `--tool-call-parser` and `--reasoning-parser` take."""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.errors import UnknownOptionError
from octavo.server.openai.parsers.hermes import HermesParser
from octavo.server.openai.parsers.llama3_json import Llama3JsonParser
from octavo.server.openai.parsers.mistral import MistralArgsParser, MistralParser
from octavo.server.openai.parsers.pythonic import PythonicParser
from octavo.server.openai.parsers.qwen3_coder import Qwen3CoderParser
from octavo.server.openai.parsers.reasoning import ReasoningParser
from octavo.server.openai.parsers.tool_calls import ToolCallParser

AUTO, NONE = "auto", "none"  # what the chat template shows; no parser at all

TOOL_CALL_PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "mistral_args": MistralArgsParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningFormat:
    """How one family marks what it thinks."""

    begin: str
    end: str
    always_starts_inside: bool = False  # the model thinks from its first token on, whether or not a tag says so

    def starts_inside(self, prompt: str) -> bool | None:
        """Return whether the answer to `prompt` starts among thoughts; None when the prompt has closed them already."""
        ending = prompt.rstrip()
        if ending.endswith(self.end):
            return None
        return self.always_starts_inside or ending.endswith(self.begin)

    def parser(self, *, starts_inside: bool) -> ReasoningParser:
        """Return what reads one answer."""
        return ReasoningParser(self.begin, self.end, starts_inside=starts_inside)


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat(begin="<think>", end="</think>"),
    "qwen3": ReasoningFormat(begin="<think>", end="</think>"),
    "deepseek_r1": ReasoningFormat(begin="<think>", end="</think>", always_starts_inside=True),
    "mistral": ReasoningFormat(begin="[THINK]", end="[/THINK]"),
}


def tool_call_parser(name: str) -> type[ToolCallParser] | None:
    """Return the parser called `name`; None for `none`.

    Raises:
        UnknownOptionError: which offers the nearest name.
    """
    if name not in (NONE, *TOOL_CALL_PARSERS):
        raise UnknownOptionError("tool call parser", name, (AUTO, NONE, *TOOL_CALL_PARSERS))
    return TOOL_CALL_PARSERS.get(name)


def reasoning_format(name: str) -> ReasoningFormat | None:
    """Return the format called `name`; None for `none`.

    Raises:
        UnknownOptionError: which offers the nearest name.
    """
    if name not in (NONE, *REASONING_FORMATS):
        raise UnknownOptionError("reasoning parser", name, (AUTO, NONE, *REASONING_FORMATS))
    return REASONING_FORMATS.get(name)
