# ruff: noqa: RUF001  (the models write such bars)
"""The right parser from the template alone, for templates in the ways of the families."""

import pytest

from octavo.demo import demo_model_path
from octavo.server.openai.answer_plan import (
    REASONING_FORMATS,
    REASONING_SIGNS,
    TOOL_CALL_PARSERS,
    TOOL_CALL_SIGNS,
    AnswerFormats,
    detected,
)
from octavo.tokenizer.tokenizer import Tokenizer

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CALLS = "{% for m in messages %}{% for call in m.tool_calls or [] %}CALL{% endfor %}{{ m.content }}{% endfor %}"
JSON_IN_TAGS = CALLS.replace(
    "CALL",
    '<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>',
)
CODER = CALLS.replace(
    "CALL",
    "<tool_call>\n<function={{ call.name }}>\n{% for k, v in call.arguments | items %}<parameter={{ k }}>\n{{ v }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>",
)
KEYS_IN_TAGS = CALLS.replace(
    "CALL",
    "<tool_call>{{ call.name }}\n{% for k in call.arguments %}<arg_key>{{ k }}</arg_key>{% endfor %}</tool_call>",
)
MISTRAL = CALLS.replace(
    "CALL", '[TOOL_CALLS] [{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}]</s>'
)
LLAMA3 = "<|start_header_id|>{{ role }}<|end_header_id|>\n\n" + CALLS.replace(
    "CALL",
    '{{ \'{"name": "\' + call.name + \'", "parameters": \' }}{{ call.arguments | tojson }}}',
)
LLAMA4 = CALLS.replace("CALL", "<|python_start|>[{{ call.name }}({{ call.arguments }})]<|python_end|>")
HARMONY = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
OPENS_IN_PROMPT = PLAIN + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (PLAIN, "none"),
        ("", "none"),
        (JSON_IN_TAGS, "hermes"),
        (CODER, "qwen3_coder"),
        (KEYS_IN_TAGS, "glm"),
        (MISTRAL, "mistral"),
        (LLAMA3, "llama3_json"),
        ("<|start_header_id|>{{ role }}<|end_header_id|>{{ content }}", "none"),
        (LLAMA4, "pythonic"),
        (LLAMA3.replace("start_header_id", "header_start") + "<|python_start|>", "llama3_json"),
        (CODER.replace("<tool_call>", "<seed:tool_call>"), "none"),
        (MISTRAL.replace("[{", "{{ call.name }}[ARGS]{"), "mistral_args"),
        (
            CALLS.replace("CALL", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ call.name }}<｜tool▁sep｜>"),
            "deepseek_v31",
        ),
        (
            CALLS.replace("CALL", "<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ call.name }}\n```json\n"),
            "deepseek_v3",
        ),
        (HARMONY, "harmony"),
        (CALLS.replace("CALL", '<|tool_call>call:{{ call.name }}{<|"|>x<|"|>}<tool_call|>'), "gemma4"),
        (CALLS.replace("CALL", "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}"), "kimi"),
        (CALLS.replace("CALL", '<tool_calls>[{"name": "{{ call.name }}"}]</tool_calls>'), "hunyuan_a13b"),
        (CALLS.replace("CALL", '<minimax:tool_call>\n<invoke name="{{ call.name }}">'), "minimax_m2"),
        (CALLS.replace("CALL", "<function_calls>{{ call.name }}()</function_calls>"), "olmo3"),
        (CALLS.replace("CALL", '<|START_ACTION|>[{"tool_name": "{{ call.name }}"}]<|END_ACTION|>'), "cohere"),
        ("<|start_of_role|>assistant<|end_of_role|>" + CALLS.replace("CALL", "<|tool_call|>[]"), "granite"),
        ("<|tool|>{{ tools | tojson }}<|/tool|>" + PLAIN, "phi4"),
        ("<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>" + PLAIN, "kimi"),
    ],
)
def test_tool_calls(template: str, name: str) -> None:
    assert detected(template, TOOL_CALL_SIGNS) == name


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (PLAIN, "none"),
        (OPENS_IN_PROMPT, "think"),
        (PLAIN.replace("m.content", "m.content.split('</think>')[-1]"), "think"),
        (HARMONY, "harmony"),
        (PLAIN + "<|channel>thought\n<channel|>", "gemma4"),
        (PLAIN + "<|START_THINKING|>{{ thoughts }}<|END_THINKING|>", "cohere"),
        (PLAIN + "[THINK]{{ thoughts }}[/THINK]", "mistral"),
    ],
)
def test_reasoning(template: str, name: str) -> None:
    assert detected(template, REASONING_SIGNS) == name


def test_the_demo_model() -> None:
    template = Tokenizer.from_path(demo_model_path()).chat_template
    assert template is not None
    assert detected(template.source, TOOL_CALL_SIGNS) == "hermes"
    assert detected(template.source, REASONING_SIGNS) == "think"


def test_names() -> None:
    tokenizer = Tokenizer.from_path(demo_model_path())
    named = AnswerFormats(tokenizer, tool_call_parser_name="hermes", reasoning_parser_name="qwen3")
    assert named.tool_calls is TOOL_CALL_PARSERS["hermes"]
    assert named.reasoning is REASONING_FORMATS["qwen3"]
    none = AnswerFormats(tokenizer, tool_call_parser_name="none", reasoning_parser_name="none")
    assert (none.tool_calls, none.reasoning) == (None, None)
