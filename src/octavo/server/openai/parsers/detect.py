"""Tells from a chat template how its model calls tools and marks thoughts.

The template is the one place where a checkpoint shows its format: it writes earlier calls the way the model was taught
to write them. Formats that Octavo does not read are named too, so that they are not taken for one that it does.
"""

from octavo.server.openai.parsers.registry import NONE

# The first line that fits wins: all marks of a line must be in the template.
_TOOL_CALL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (NONE, ("<arg_key>",)),  # GLM
    (NONE, ("<tool_call>", "<tool_sep>")),  # Hunyuan
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("[func_name1(",)),  # Llama 3.2 and 4, when told to
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("llama3_json", ("<|header_start|>", '"parameters"')),  # Llama 4
    ("pythonic", ("<|python_start|>",)),  # Llama 4
    ("pythonic", ("<|tool_call_start|>",)),  # LFM2
)

_REASONING_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("think", ("<think>",)),
    ("think", ("</think>",)),  # cuts thoughts off, and leaves it to the model to open them
    ("mistral", ("[THINK]",)),
)


def detect_tool_call_parser(template: str) -> str:
    """Return the name of the tool call parser for models with this chat template; `none` if there is none."""
    return _first_fitting(template, _TOOL_CALL_SIGNS)


def detect_reasoning_parser(template: str) -> str:
    """Return the name of the reasoning parser for models with this chat template; `none` if there is none."""
    return _first_fitting(template, _REASONING_SIGNS)


def _first_fitting(template: str, signs: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    return next((name for name, marks in signs if all(mark in template for mark in marks)), NONE)
