"""How the model of a server marks calls and thoughts, and what that means for one request and its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.sampling_params import SamplingParams
from octavo.server.errors import bad_request
from octavo.server.openai.parsers.base import ContentOnly, OutputParser
from octavo.server.openai.parsers.call_limit import CallLimit
from octavo.server.openai.parsers.chain import Chain
from octavo.server.openai.parsers.detect import detect_reasoning_parser, detect_tool_call_parser
from octavo.server.openai.parsers.registry import AUTO, reasoning_format, tool_call_parser
from octavo.server.openai.parsers.special_tokens import SpecialTokenFilter
from octavo.server.openai.protocol import ChatCompletionRequest
from octavo.server.openai.thinking_tokens import ThinkingTokens
from octavo.server.openai.tools import ToolUse, tool_use
from octavo.tokenizer.tokenizer import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NUM_TAIL_TOKENS = 16  # enough of a prompt to see the tags that it ends in
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerReader:
    """What reads one sample."""

    parser: OutputParser = field(default_factory=ContentOnly)
    thinking: ThinkingTokens | None = None


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

    def plan(self, request: ChatCompletionRequest, params: SamplingParams) -> "AnswerPlan":
        """Return what `request`, of whose fields `params` were made, means for its prompt and its answers.

        Raises:
            ApiError: 400, naming the field.
            InvalidParameterError: a tool's schema is too large or too deep.
        """
        tools = tool_use(request, self.tool_calls)
        if tools is not None:
            params = params.replace(structured_output=tools.form(params.structured_output))
        marks = self._marks(tools)
        hidden: frozenset[str] = frozenset()
        if marks & self.special_tokens and params.skip_special_tokens:
            params = params.replace(skip_special_tokens=False)
            hidden = self.special_tokens - marks
        return AnswerPlan(
            formats=self,
            tools=tools,
            params=params,
            prompt_options=prompt_options(request, tools),
            hidden=hidden,
            shows_reasoning=request.include_reasoning is not False,
        )

    def _marks(self, tools: ToolUse | None) -> frozenset[str]:
        """Return the strings that the readers of an answer must see."""
        of_calls = () if tools is None else tools.own_parser.markers
        of_thoughts = () if self.reasoning is None else (self.reasoning.begin, self.reasoning.end)
        return frozenset((*of_calls, *of_thoughts))


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPlan:
    """One request, as far as calls and thoughts go."""

    formats: AnswerFormats
    tools: ToolUse | None
    params: SamplingParams
    prompt_options: Mapping[str, object]  # for the chat template
    hidden: frozenset[str]  # special tokens that the engine shows, and the client must not see
    shows_reasoning: bool

    def reader(self, prompt_token_ids: Sequence[int]) -> AnswerReader:
        """Return what reads one sample of the answer to this prompt."""
        parser, thinking = self._call_parser(), None
        if self.formats.reasoning is not None:
            tokenizer, reasoning = self.formats.tokenizer, self.formats.reasoning
            tail = tokenizer.decode(prompt_token_ids[-_NUM_TAIL_TOKENS:], skip_special_tokens=False)
            if (thoughts := reasoning.parser_after(tail)) is not None:
                thinking = ThinkingTokens(tokenizer, thoughts, reasoning.end)
                parser = Chain(thoughts, parser)
        if self.hidden:
            parser = Chain(SpecialTokenFilter(self.hidden), parser)
        return AnswerReader(parser=parser, thinking=thinking)

    def _call_parser(self) -> OutputParser:
        if self.tools is None:
            return ContentOnly()
        parser = self.tools.parser(self.params)(self.tools.schemas)
        return parser if self.tools.is_parallel else CallLimit(parser, 1)


def prompt_options(request: ChatCompletionRequest, tools: ToolUse | None) -> dict[str, object]:
    """Return what the chat template is told beside the messages. The client's own variables go last, and so win.

    Raises:
        ApiError: 400, naming the field.
    """
    options: dict[str, object] = {} if tools is None else {"tools": tools.prompt_tools}
    effort = request.reasoning_effort
    if effort is not None:
        if effort not in EFFORTS:
            raise bad_request(f"reasoning_effort must be one of {', '.join(EFFORTS)}.", "reasoning_effort")
        options |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    for name, value in (request.chat_template_kwargs or {}).items():
        if name in _OWN_VARIABLES:
            raise bad_request(f"'{name}' is a field of its own.", f"chat_template_kwargs.{name}")
        options[name] = value
    return options


def _template_text(tokenizer: Tokenizer) -> str:
    template = tokenizer.chat_template
    return "" if template is None else template.source + (template.tool_use_source or "")
