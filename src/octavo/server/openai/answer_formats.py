"""How the model of a server marks calls and thoughts."""

from collections.abc import Sequence

from octavo.server.openai.parsers.detect import detect_reasoning_parser, detect_tool_call_parser
from octavo.server.openai.parsers.registry import AUTO, reasoning_format, tool_call_parser
from octavo.tokenizer.tokenizer import Tokenizer

_NUM_TAIL_TOKENS = 16  # enough of a prompt to see the tags that it ends in


class AnswerFormats:
    """The formats of one model, known from its chat template or given by name.

    Raises:
        UnknownOptionError: there is no parser of that name.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, tool_call_parser_name: str = AUTO, reasoning_parser_name: str = AUTO
    ) -> None:
        template = _template_text(tokenizer)
        if tool_call_parser_name == AUTO:
            tool_call_parser_name = detect_tool_call_parser(template)
        if reasoning_parser_name == AUTO:
            reasoning_parser_name = detect_reasoning_parser(template)
        self.tool_calls = tool_call_parser(tool_call_parser_name)
        self.reasoning = reasoning_format(reasoning_parser_name)
        self.tokenizer = tokenizer
        self.special_tokens = frozenset(map(tokenizer.token_text, tokenizer.special_token_ids))

    @property
    def thought_tags_are_tokens(self) -> bool:
        """Whether thoughts begin and end with one token each, so that a grammar can tell where they do."""
        tags = () if self.reasoning is None else (self.reasoning.begin, self.reasoning.end)
        return all(len(self.tokenizer.encode(tag, add_special_tokens=False)) == 1 for tag in tags)

    def starts_inside(self, prompt_token_ids: Sequence[int]) -> bool | None:
        """Return whether answers to this prompt start among thoughts; None when there are no thoughts to look for."""
        if self.reasoning is None:
            return None
        tail = prompt_token_ids[-_NUM_TAIL_TOKENS:]
        return self.reasoning.starts_inside(self.tokenizer.decode(tail, skip_special_tokens=False))


def _template_text(tokenizer: Tokenizer) -> str:
    template = tokenizer.chat_template
    return "" if template is None else template.source + (template.tool_use_source or "")
