"""Chat templates render as transformers renders them, and refuse what they should with an error that says why."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from octavo.errors import InvalidParameterError
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.tokenizer import Tokenizer

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}{%- continue %}{%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{% generation %}{{- '\\n' + message.content }}{% endgeneration %}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' }}{{- call.function | tojson(indent=1) }}{{- '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{% for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{% endif %}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}

USER: dict[str, Any] = {"role": "user", "content": "Is 3 < 5 & 'so' on? é🙂"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "It is. "}
SYSTEM: dict[str, Any] = {"role": "system", "content": " Be brief. "}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<é>"}}}],
}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add", "description": "a < b & c's é"}}]


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(folders["sentencepiece"], target)
    return target


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([USER], {"add_generation_prompt": True}),
        ([USER], {"add_generation_prompt": False}),
        ([USER, ANSWER, USER], {"add_generation_prompt": True}),
        ([USER, ANSWER], {"add_generation_prompt": False, "continue_final_message": True}),
        ([USER], {"add_generation_prompt": True, "enable_thinking": False}),
    ],
)
def test_renders_as_transformers_do(folder: Path, name: str, messages: list[dict[str, Any]], options: Any) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    ours, theirs = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    text = ours.render_chat(messages, **options)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    ids = theirs.apply_chat_template(messages, return_dict=False, **options)
    assert ours.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("messages", [[SYSTEM, USER], [SYSTEM, USER, CALL, {"role": "tool", "content": "4"}]])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_system_prompts_and_tools_render_as_transformers_do(folder: Path, messages: Any, tools: Any) -> None:
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    ours, theirs = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages, tools=tools) == expected
    assert ("a < b & c's é" in expected) is (tools is not None)


def test_special_tokens_are_not_doubled(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(MISTRAL, encoding="utf-8")
    tokenizer = Tokenizer.from_path(folder)
    ids = tokenizer.encode(tokenizer.render_chat([USER]), add_special_tokens=False)
    assert ids.count(1) == 1
    assert ids[0] == 1


def test_where_the_template_is_found(folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    config = plain / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))

    config.write_text(json.dumps(fields | {"chat_template": "from config"}), encoding="utf-8")
    assert Tokenizer.from_path(plain).render_chat([USER]) == "from config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    config.write_text(json.dumps(fields | {"chat_template": named}), encoding="utf-8")
    assert Tokenizer.from_path(plain).render_chat([USER]) == "plain"
    assert Tokenizer.from_path(plain).render_chat([USER], tools=TOOLS) == "with tools"
    (plain / "chat_template.json").write_text('{"chat_template": "from json"}', encoding="utf-8")
    assert Tokenizer.from_path(plain).render_chat([USER]) == "from json"
    (plain / "chat_template.jinja").write_text("from jinja", encoding="utf-8")
    assert Tokenizer.from_path(plain).render_chat([USER]) == "from jinja"
    (plain / "additional_chat_templates").mkdir()
    (plain / "additional_chat_templates" / "tool_use.jinja").write_text("from folder", encoding="utf-8")
    (plain / "additional_chat_templates" / "rag.jinja").write_text("unused", encoding="utf-8")
    for tools, expected in ((None, "from jinja"), (TOOLS, "from folder")):
        assert Tokenizer.from_path(plain).render_chat([USER], tools=tools) == expected
        reference = AutoTokenizer.from_pretrained(plain).apply_chat_template([USER], tools=tools, tokenize=False)
        assert reference == expected


def test_no_template_is_said_so(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidParameterError, match="no chat template"):
        Tokenizer.from_path(folders["byte_level"]).render_chat([USER])


def test_what_the_template_refuses_is_passed_on() -> None:
    with pytest.raises(InvalidParameterError, match="roles must alternate") as caught:
        ChatTemplate(MISTRAL).render([USER, USER])
    assert caught.value.field == "messages"


def test_templates_that_know_no_developer_get_a_system_message_and_errors_name_the_role_given() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert ChatTemplate(CHATML).render([developer, USER]) == ChatTemplate(CHATML).render(
        [developer | {"role": "system"}, USER]
    )
    own = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{% endfor %}"
    assert ChatTemplate(own).render([developer, USER]) == "D"
    with pytest.raises(InvalidParameterError, match="developer") as caught:
        ChatTemplate(MISTRAL).render([developer, USER, USER])
    assert "system" not in str(caught.value)


FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('System first!') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
DROPS_LATE = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("source", [FIRST_ONLY, DROPS_LATE])
def test_system_messages_that_are_not_first_are_merged_into_the_first(source: str) -> None:
    late = [{"role": "system", "content": "A"}, USER, ANSWER, {"role": "developer", "content": "B"}, USER]
    template = ChatTemplate(source)
    assert template.must_merge(late)
    assert template.render(late).startswith("[system]A\n\nB[user]")
    assert template.render(late[1:]).startswith("[system]B[user]")
    assert not template.must_merge(late[:3])
    assert not ChatTemplate(CHATML).must_merge(late)


def test_templates_that_read_parts_only_lose_no_text() -> None:
    """LLaVA's, shortened: of a string it would write the parts, which it does not have."""
    source = (
        "{% for message in messages %}{{ message['role'].upper() }}: "
        "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
        "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }} {% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    seen = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}, ANSWER]
    asked = {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]}
    text = ChatTemplate(source).render([*seen, asked])
    assert text == f"USER: <image>What? ASSISTANT: {ANSWER['content']} USER: And now? ASSISTANT:"
    going_on = ChatTemplate(source).render(seen, continue_final_message=True)
    assert going_on == f"USER: <image>What? ASSISTANT: {ANSWER['content']}"


# How templates treat a call without text: DeepSeek-R1-Distill's tests for null and concatenates JSON text, Zephyr's and
# SmolLM2's concatenate the text, Llama 3.1's applies `tojson` to results, others write whatever they are given.
NULL_OR_TEXT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}{% for c in m['tool_calls'] %}"
    "{{ c['function']['name'] + ':' + c['function']['arguments'] + ';' }}{% endfor %}"
    "{% elif m['content'] is not none %}{{ m['role'] + '=' + m['content'].split('</think>')[-1] + ';' }}"
    "{% endif %}{% endfor %}"
)
NEEDS_TEXT = "{% for m in messages %}{{ m['role'] + '=' + m['content'] + ';' }}{% endfor %}"
WRITES_ALL = (
    "{% for m in messages %}{{ m.role }}={{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}:{{ c.function.arguments }}{% endfor %};{% endfor %}"
)
RESULTS_AS_JSON = (
    "{% for m in messages %}{% if m.tool_calls is defined %}{% set f = m.tool_calls[0].function %}"
    "{{ f.name }}:{{ f.arguments | tojson }};{% elif m.role == 'tool' %}"
    "{% if m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %};"
    "{% else %}{{ m.role + '=' + m.content + ';' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (NULL_OR_TEXT, 'user=U;add:{"a": 1, "b": "<é>"};'),
        (NEEDS_TEXT, "user=U;assistant=;tool=;"),
        (WRITES_ALL, 'user=U;assistant=add:{"a": 1, "b": "<é>"};tool=;'),
        (RESULTS_AS_JSON, 'user=U;add:{"a": 1, "b": "<é>"};"";'),
    ],
)
def test_a_call_without_text_is_given_in_the_form_that_the_template_reads(source: str, expected: str) -> None:
    """What a server returned beside calls, `content: null`, comes back to it in the next request."""
    user, result = {"role": "user", "content": "U"}, {"role": "tool", "content": None}
    template = ChatTemplate(source)
    assert template.render([user, CALL, result]) == expected
    assert template.render([user, {**CALL, "content": ""}, {"role": "tool"}]) == expected
    assert "None" not in template.render([user, {"role": "assistant", "content": None}, user])


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ messages[9].content }}",
        "{{ 1 + 'x' }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_broken_and_unsafe_templates_are_errors(source: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"\['user'\]: the chat template cannot render them$"):
        ChatTemplate(source).render([USER])


def test_a_broken_template_disturbs_no_one_who_does_not_chat() -> None:
    assert ChatTemplate("{% for %}").source == "{% for %}"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("Hello", "messages"),
        (["Hello"], r"messages\[0\]"),
        ([{"content": "Hello"}], r"messages\[0\]\.role"),
        ([USER, {"role": "user", "content": 3}], r"messages\[1\]\.content"),
        ([USER, {"role": "user", "content": None}], r"messages\[1\]\.content"),
        ([{"role": "developer"}, USER], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content\[0\]"),
    ],
)
def test_malformed_messages_are_named(messages: Any, field: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{field}="):
        ChatTemplate(CHATML).render(messages)


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": parts}]) == "one two"


def test_a_thought_in_a_field_of_its_own_is_continued_where_the_template_writes_it() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content is string %}"
        "{{ '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}"
        "{{ m.content if m.content is string else '' }}<end>{% endfor %}"
    )
    begun = {"role": "assistant", "content": None, "reasoning_content": "We add "}
    going_on = ChatTemplate(source).render([{"role": "user", "content": "U"}, begun], continue_final_message=True)
    assert going_on == "<user>U<end><assistant><think>\nWe add "
    answer = {**begun, "content": "It is"}
    assert ChatTemplate(source).render([answer], continue_final_message=True).endswith("</think>\n\nIt is")


def test_what_cannot_be_continued_is_an_error() -> None:
    with pytest.raises(InvalidParameterError, match="continue_final_message"):
        ChatTemplate(CHATML).render([USER, CALL], continue_final_message=True)
    with pytest.raises(InvalidParameterError, match="drops the last message"):
        ChatTemplate("nothing of it").render([USER], continue_final_message=True)


def test_the_clock_is_there_for_templates_that_ask() -> None:
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([USER])) == len("2026-01-01")


def test_messages_are_left_as_they_were() -> None:
    messages = [USER, dict(ANSWER)]
    ChatTemplate(CHATML).render(messages, continue_final_message=True)
    assert messages == [USER, ANSWER]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{{ 'x' * 10 ** 6 }}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ lipsum(n=10 ** 9) }}",
        "{% set ns = namespace(x='xy') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x='xy') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x='xy') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('x', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='xy') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        "{% set ns = namespace(x=[1, 2]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set x = 'x' * 10 ** 6 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 10**6 + "{% endfor %}",
        "{{ 'x'.ljust(10 ** 10) }}",
        "{{ 'x' | center(10 ** 10) }}",
        "{{ 1 | round(10 ** 10, 'ceil') }}",
        "{{ '%010000000000d' % 1 }}",
        "{{ '%*d' | format(10 ** 10, 1) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 10) }}",
    ],
)
def test_a_template_that_loops_or_asks_for_memory_is_stopped(source: str) -> None:
    with pytest.raises(InvalidParameterError, match="the chat template cannot render them"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_large_numbers_and_long_texts_are_no_reason_to_stop() -> None:
    source = (
        "{% for m in messages %}{{ '<|' ~ m.role + '|>' }}{{ m.content.strip() | trim }}"
        "{{ {'at': 1700000000} | tojson }}{{ 1700000000 | string }}{{ '%s: %d' % ('**', 1700000000) }}"
        "{{ '{}{{}}'.format(17000000) }}{% endfor %}"
    )
    content = '{"id": 12345678} {:>9999999}' * 100_000
    rendered = '{"at": 1700000000}1700000000**: 170000000017000000{}'
    assert ChatTemplate(source).render([{"role": "user", "content": content}]) == f"<|user|>{content}{rendered}"


def test_counted_loops_have_all_of_their_variables() -> None:
    source = (
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
        "{{ loop.nextitem }}{% else %}none{% endfor %}{% for x in nothing %}{% else %}-{% endfor %}{{ '=' * 3 }}"
    )
    messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    assert ChatTemplate(source).render(messages) == "1/2False{'role': 'user', 'content': 'c'}2/2True-==="


def test_which_variables_a_template_reads() -> None:
    own = "{% set on = thinking | default(true) %}{% if on %}<think>{% endif %}"
    template = ChatTemplate(own, tool_use_source="{% for tool in tools %}{{ tool }}{% endfor %}")
    assert template.reads("thinking")
    assert not template.reads("tools")
    assert template.reads("tools", with_tools=True)
    assert not template.reads("thinking", with_tools=True)
