"""Tool calls and reasoning of a chat: how a model marks them, what a request makes of them, how answers are parsed.

A chat template reveals a model's formats: it renders earlier calls as the model was trained to write them. Unsupported
formats are listed, too, so that they are not mistaken for supported ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from octavo.sampling_params import SamplingParams
from octavo.server.http.errors import bad_request
from octavo.server.openai.chat_prompt import BegunAnswer, prompt_options
from octavo.server.openai.parsers.base import OutputParser, ReasoningCounter
from octavo.server.openai.parsers.deepseek import SEP, DeepSeekParser, DeepSeekV3Parser
from octavo.server.openai.parsers.gemma4 import BEGIN, QUOTE, Gemma4Parser
from octavo.server.openai.parsers.glm import GlmParser
from octavo.server.openai.parsers.harmony import CHANNEL, MESSAGE, HarmonyFormat, HarmonyParser
from octavo.server.openai.parsers.json_calls import HermesParser, Llama3JsonParser, MistralArgsParser, MistralParser
from octavo.server.openai.parsers.json_lists import CohereParser, GraniteParser, HunyuanParser, Phi4Parser
from octavo.server.openai.parsers.kimi import KimiParser
from octavo.server.openai.parsers.minimax import MiniMaxParser
from octavo.server.openai.parsers.pythonic import OlmoParser, PythonicParser
from octavo.server.openai.parsers.qwen3_coder import Qwen3CoderParser
from octavo.server.openai.parsers.tool_calls import ToolCallParser
from octavo.server.openai.parsers.wrappers import (
    Chain,
    ContentStops,
    ReasoningFormat,
    ReasoningParser,
    SpecialTokenFilter,
)
from octavo.server.openai.protocol import ChatCompletionRequest
from octavo.server.openai.tools import ToolUse, tool_use
from octavo.structured_output import MAX_REASONING_TOKENS, Reasoning, StructuredOutput
from octavo.tokenizer.infill import Infill
from octavo.tokenizer.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"  # detected from the chat template; no parser
HARMONY = "harmony"  # reasoning, answer and calls in one format

TOOL_CALL_PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "mistral_args": MistralArgsParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "glm": GlmParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekParser,
    "kimi": KimiParser,
    "gemma4": Gemma4Parser,
    "granite": GraniteParser,
    "phi4": Phi4Parser,
    "hunyuan_a13b": HunyuanParser,
    "cohere": CohereParser,
    "minimax_m2": MiniMaxParser,
    "olmo3": OlmoParser,
    HARMONY: HarmonyParser,
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat(begin="<think>", end="</think>"),
    "qwen3": ReasoningFormat(begin="<think>", end="</think>"),
    "deepseek_r1": ReasoningFormat(begin="<think>", end="</think>", always_starts_inside=True),
    "mistral": ReasoningFormat(begin="[THINK]", end="[/THINK]"),
    "cohere": ReasoningFormat(begin="<|START_THINKING|>", end="<|END_THINKING|>"),
    "gemma4": ReasoningFormat(begin="<|channel>", end="<channel|>", label="thought"),
    HARMONY: HarmonyFormat(),
}

# The first entry that matches wins: all of its markers must be in the template.
TOOL_CALL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, (CHANNEL, MESSAGE)),
    ("gemma4", (BEGIN, QUOTE)),
    ("glm", ("<arg_key>",)),
    ("kimi", ("<|tool_calls_section_begin|>",)),
    ("kimi", ("<|im_system|>tool_declare",)),  # of the first Kimi K2, which writes no earlier calls
    ("deepseek_v3", (SEP, "```json")),
    ("deepseek_v31", (SEP,)),
    (NONE, ("<tool_call>", "<tool_sep>")),  # Hunyuan, dense
    ("hunyuan_a13b", ("<tool_calls>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("olmo3", ("<function_calls>",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("granite", ("<|start_of_role|>", "<|tool_call|>")),
    ("phi4", ("<|tool|>", "<|/tool|>")),
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

REASONING_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, (CHANNEL, MESSAGE)),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("cohere", ("<|START_THINKING|>",)),
    ("think", ("<think>",)),
    ("think", ("</think>",)),  # drops earlier reasoning; the model opens its own
    ("mistral", ("[THINK]",)),
)
_SWITCHES = ("enable_thinking", "thinking")  # what templates call the variable that turns reasoning on and off
_NUM_TAIL_TOKENS = 16  # enough of a prompt to see its final tags


class AnswerFormats:
    """How one model marks tool calls and reasoning, detected from its chat template or given by name."""

    def __init__(
        self, tokenizer: Tokenizer, *, tool_call_parser_name: str = AUTO, reasoning_parser_name: str = AUTO
    ) -> None:
        template = tokenizer.chat_template
        text = "" if template is None else template.source + (template.tool_use_source or "")
        if tool_call_parser_name == AUTO:
            tool_call_parser_name = detected(text, TOOL_CALL_SIGNS)
        if reasoning_parser_name == AUTO:
            reasoning_parser_name = detected(text, REASONING_SIGNS)
        if tool_call_parser_name == HARMONY:
            reasoning_parser_name = HARMONY
        elif reasoning_parser_name == HARMONY and tool_call_parser_name != NONE:
            tool_call_parser_name = HARMONY
        self.tool_calls = None if tool_call_parser_name == NONE else TOOL_CALL_PARSERS[tool_call_parser_name]
        self.reasoning = None if reasoning_parser_name == NONE else REASONING_FORMATS[reasoning_parser_name]
        self.is_harmony = isinstance(self.reasoning, HarmonyFormat)
        self.tokenizer = tokenizer
        self.special_tokens = frozenset(map(tokenizer.token_text, tokenizer.special_token_ids))

    @cached_property
    def infill(self) -> Infill | None:
        """How the model fills in the middle of a text; None: it does not."""
        return Infill.of(self.tokenizer)

    @cached_property
    def counts_reasoning(self) -> bool:
        """Whether a constraint can count the tokens of reasoning: it recognizes tags that are single tokens."""
        encode = self.tokenizer.encode
        tags = () if self.reasoning is None else self.reasoning.tokens
        return bool(tags) and all(len(encode(tag, add_special_tokens=False)) == 1 for tag in tags)

    def starts_inside(self, prompt_token_ids: Sequence[int], begun: BegunAnswer | None = None) -> bool | None:
        """Return whether answers to this prompt start inside reasoning; None if there is no reasoning to look for."""
        if self.reasoning is None:
            return None
        if begun is not None and begun.reasoning:
            return None if begun.content else True
        if begun is not None and (inside := self.reasoning.continues_inside(begun.content)) is not False:
            return inside
        tail = prompt_token_ids[-_NUM_TAIL_TOKENS:]
        return self.reasoning.starts_inside(self.tokenizer.decode(tail, skip_special_tokens=False))


def detected(template: str, signs: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    """Return the name of the format that a chat template shows; `none` if there is none."""
    return next((name for name, marks in signs if all(mark in template for mark in marks)), NONE)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPlan:
    """The part of a chat request about tool calls and reasoning. `after` adds what depends on the end of the prompt."""

    formats: AnswerFormats
    tools: ToolUse | None
    params: SamplingParams
    prompt_options: Mapping[str, object]  # for the chat template
    hidden: frozenset[str]  # special tokens that the engine emits but the client must not see
    shows_reasoning: bool
    thinking_budget: int | None  # tokens
    thinks_not: bool = False  # the client has turned reasoning off
    starts_inside: bool | None = None  # answers start inside reasoning; None: there is none
    is_continued: bool = False  # the prompt ends within the answer

    @classmethod
    def of(cls, request: ChatCompletionRequest, params: SamplingParams, formats: AnswerFormats) -> Self:
        """Return the plan of `request` for this model; `params` come from its other fields."""
        has_tools = bool(request.tools) or request.tool_choice is not None
        tools = tool_use(request, formats.tool_calls) if has_tools else None
        if tools is not None:
            params = params.replace(structured_output=tools.constraint(params.structured_output))
        # The markers that the parsers must see.
        marks = set() if tools is None else set(tools.own_parser.markers)
        marks |= set() if formats.reasoning is None else set(formats.reasoning.marks)
        hidden: frozenset[str] = frozenset()
        if marks & formats.special_tokens and params.skip_special_tokens:
            params = params.replace(skip_special_tokens=False)
            hidden = formats.special_tokens - marks
        options = prompt_options(request, None if tools is None else tools.prompt_tools)
        return cls(
            formats=formats,
            tools=tools,
            params=params,
            prompt_options=options,
            hidden=hidden,
            shows_reasoning=request.include_reasoning is not False,
            thinking_budget=_thinking_budget(request, formats),
            thinks_not=any(options.get(name) is False for name in _SWITCHES),
        )

    def after(self, prompt_token_ids: Sequence[int], begun: BegunAnswer | None = None) -> Self:
        """Return the plan for answers to this prompt: with reasoning and its budget before the constraint.

        `begun` is the part of the answer in which the prompt ends. Raises ApiError, 400: a budget that cannot be kept.
        """
        starts_inside = self.formats.starts_inside(prompt_token_ids, begun)
        plan = replace(self, starts_inside=starts_inside, is_continued=begun is not None)
        constraint, tags = self.params.structured_output, self.formats.reasoning
        if tags is None or starts_inside is None or (constraint is None and self.thinking_budget is None):
            return plan
        if constraint is not None and constraint.kind != "tags":
            constraint = replace(constraint, opening=tags.answer_begin)
        if self.formats.counts_reasoning and not (self.thinks_not and constraint and not starts_inside):
            budget = 0 if self.thinks_not else self.thinking_budget  # the template opens the reasoning all the same
            reasoning = Reasoning(begin=tags.begin, end=tags.end, is_open=starts_inside, max_tokens=budget)
            whole = replace(constraint, reasoning=reasoning) if constraint else StructuredOutput(reasoning=reasoning)
            return replace(plan, params=self.params.replace(structured_output=whole))
        if self.thinking_budget is not None and not self.thinks_not:
            text = f"This model's tokenizer has no token {tags.end!r}, so reasoning tokens cannot be counted."
            raise bad_request(text, "thinking_token_budget", "unsupported_parameter")
        if self.formats.is_harmony:
            return replace(plan, params=self.params.replace(structured_output=constraint))
        if constraint is not None and constraint.kind == "tags" and constraint.free_text:  # which reasoning is part of
            return plan
        return replace(plan, starts_inside=None)  # constrained from the first token: no room for reasoning

    def readers(self, draw: Callable[[], bytes] | None = None) -> tuple[OutputParser, ReasoningCounter | None]:
        """Return the parser of one sample, and the part of it that reads reasoning, if there may be any.

        `draw` returns random bytes for the ids of calls.
        """
        parser = OutputParser()
        reasoning: ReasoningCounter | None = None
        tags, tools = self.formats.reasoning, self.tools
        most = None if tools is None or tools.is_parallel else 1
        if self.formats.is_harmony:
            schemas = {} if tools is None else tools.schemas
            parser = reasoning = HarmonyParser(schemas, draw, most, starts_inside=self.starts_inside)
        elif tools is not None:
            parser = tools.parser(self.params)(tools.schemas, draw, most)
        if self.starts_inside is not None and tags is not None and not self.formats.is_harmony:
            calls = () if tools is None else tools.own_parser.openings(tools.schemas)
            thoughts = ReasoningParser(
                tags.begin,
                tags.end,
                starts_inside=self.starts_inside,
                is_continued=self.is_continued,
                calls=calls,
                label=tags.label,
            )
            reasoning, parser = thoughts, Chain(thoughts, parser)
        if self.hidden:
            parser = Chain(SpecialTokenFilter(self.hidden), parser)
        return parser, reasoning

    @property
    def new_stop_finder(self) -> Callable[[], ContentStops] | None:
        """What finds the stop strings of one sample; None if all of its text is content."""
        is_marked = self.tools is not None or self.starts_inside is not None or self.formats.is_harmony
        if not self.params.stop or not is_marked:
            return None
        stop, include = tuple(self.params.stop), self.params.include_stop_str_in_output
        return lambda: ContentStops(self.readers()[0], stop, include)


def _thinking_budget(request: ChatCompletionRequest, formats: AnswerFormats) -> int | None:
    budget, param = request.thinking_token_budget, "thinking_token_budget"
    if budget is None:
        return None
    if formats.reasoning is None:
        text = "No reasoning format is known for this model; see the server's --reasoning-parser."
        raise bad_request(text, param, "unsupported_parameter")
    if not 0 <= budget <= MAX_REASONING_TOKENS:
        raise bad_request(f"{param}={budget}: from 0 to {MAX_REASONING_TOKENS}.", param)
    return budget
