"""Which tools a request lets the model call, and whether it must: the four ways to write `tool_choice`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.server.errors import bad_request
from octavo.server.openai.protocol import ChatCompletionRequest, ToolChoiceObject

_WORDS = ("auto", "none", "required")
_PARAM = "tool_choice"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolChoice:
    """What `tool_choice` comes to. One that exists names tools that there are."""

    mode: Literal["auto", "none", "required"]
    names: tuple[str, ...]  # that may be called
    is_subset: bool = False  # of the tools that the model is shown
    is_named: bool = False  # the one call that is to be made


def tool_choice(request: ChatCompletionRequest, names: Sequence[str]) -> ToolChoice:
    """Return what the request chooses from the tools called `names`.

    Raises:
        ApiError: 400, naming the field.
    """
    choice = request.tool_choice
    if isinstance(choice, ToolChoiceObject):
        return _chosen(choice, names)
    if choice not in (None, *_WORDS):
        raise bad_request(f"tool_choice must be one of {', '.join(_WORDS)}, or an object.", _PARAM)
    if choice == "required" and not names:
        raise bad_request("'tool_choice' needs 'tools' to choose from.", _PARAM)
    return ToolChoice(mode=_mode(choice, _PARAM), names=tuple(names))


def _chosen(choice: ToolChoiceObject, names: Sequence[str]) -> ToolChoice:
    match choice:
        case ToolChoiceObject(type="function", function=function) if function is not None:
            return ToolChoice(mode="required", names=_among((function.name,), names), is_subset=True, is_named=True)
        case ToolChoiceObject(type="allowed_tools", allowed_tools=allowed) if allowed is not None:
            chosen = _among([tool.function.name for tool in allowed.tools], names)
            return ToolChoice(mode=_mode(allowed.mode, f"{_PARAM}.allowed_tools.mode"), names=chosen, is_subset=True)
    missing = f"{_PARAM}.{choice.type}"
    raise bad_request(f"Missing required parameter: '{missing}'.", missing, "missing_required_parameter")


def _among(chosen: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    for name in chosen:
        if name not in names:
            raise bad_request(f"'tool_choice' names '{name}', which is not among the tools.", _PARAM)
    if not chosen:
        raise bad_request("'tool_choice' must leave at least one tool.", _PARAM)
    return tuple(dict.fromkeys(chosen))


def _mode(mode: str | None, param: str) -> Literal["auto", "none", "required"]:
    match mode:
        case None | "auto":
            return "auto"
        case "none" | "required":
            return mode
    raise bad_request(f"{param} must be auto or required.", param)
