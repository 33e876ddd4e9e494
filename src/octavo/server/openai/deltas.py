"""What pieces of an answer look like on the wire, streamed and whole."""

from msgspec import UNSET

from octavo.server.openai.parsers.base import Content, Delta, ParsedMessage, Reasoning, ToolCallArguments, ToolCallStart
from octavo.server.openai.replies import AnswerCall, AnswerFunction, AnswerMessage


def wire_delta(delta: Delta) -> dict[str, object]:
    """Return the `delta` of a chunk. The first one of a call names it, later ones bring pieces of its arguments.

    Reasoning goes under both names that clients look for.
    """
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallStart(index, id_, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id_, "type": "function", "function": function}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def wire_message(message: ParsedMessage, *, shows_reasoning: bool) -> AnswerMessage:
    """Return a whole answer. Beside calls, no text is null; thoughts and calls that are not there are left out."""
    reasoning = message.reasoning if message.reasoning and shows_reasoning else UNSET
    calls = [
        AnswerCall(id=call.id, function=AnswerFunction(name=call.name, arguments=call.arguments))
        for call in message.tool_calls
    ]
    return AnswerMessage(
        content=None if calls and not message.content else message.content,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=calls or UNSET,
    )
