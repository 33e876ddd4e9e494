"""openai-python, unchanged: whole answers, streams, its accumulating helper, and the errors it raises."""

import openai
import pytest
from openai import OpenAI
from tests.clients.words import GREEDY, MODEL, QUESTION


def whole(client: OpenAI) -> str:
    return str(client.chat.completions.create(**GREEDY, messages=QUESTION).choices[0].message.content)


def test_a_stream_spells_the_whole_answer(client: OpenAI) -> None:
    with client.chat.completions.create(
        **GREEDY, messages=QUESTION, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == whole(client)
    assert sum(text != "" for text in deltas) > 1
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop"]
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_the_streaming_helper_builds_the_whole_answer(client: OpenAI) -> None:
    with client.chat.completions.stream(**GREEDY, messages=QUESTION, logprobs=True, top_logprobs=2) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole(client)
    assert final.choices[0].finish_reason == "stop"
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].logprobs.content[0].top_logprobs[0].logprob <= 0


def test_samples_streamed_together_stay_apart(client: OpenAI) -> None:
    fields = {"model": MODEL, "messages": QUESTION, "n": 3, "seed": 7, "temperature": 5.0, "max_tokens": 20}
    choices = client.chat.completions.create(**fields).choices
    texts = ["", "", ""]
    with client.chat.completions.create(**fields, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert len(set(texts)) == 3
    assert [(choice.index, choice.message.content) for choice in choices] == list(enumerate(texts))


def test_logprobs_spell_the_text(client: OpenAI) -> None:
    choice = client.chat.completions.create(**GREEDY, messages=QUESTION, logprobs=True, top_logprobs=2).choices[0]
    rows = choice.logprobs.content
    assert bytes(byte for row in rows for byte in row.bytes or []).decode() == choice.message.content
    assert all(len(row.top_logprobs) == 2 and row.logprob == row.top_logprobs[0].logprob for row in rows)


def test_stop_and_length(client: OpenAI) -> None:
    text = whole(client)
    mark = text[10:14]
    stopped = client.chat.completions.create(**GREEDY, messages=QUESTION, stop=[mark]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text.partition(mark)[0], "stop")
    cut = client.chat.completions.create(**GREEDY, messages=QUESTION, max_completion_tokens=2, max_tokens=50)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 2)


def test_completions(client: OpenAI) -> None:
    fields = {**GREEDY, "prompt": ["Octavo is", "A block is"], "max_tokens": 6}
    texts = [choice.text for choice in client.completions.create(**fields).choices]
    streamed = ["", ""]
    with client.completions.create(**fields, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
    assert streamed == texts
    assert all(texts)


def test_echo_with_logprobs_as_evaluation_harnesses_ask(client: OpenAI) -> None:
    prompt = "Octavo is an engine"
    for max_tokens in (0, 1):
        choice = client.completions.create(
            **GREEDY, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1
        ).choices[0]
        rows = choice.logprobs
        lengths = {len(rows.tokens), len(rows.token_logprobs), len(rows.top_logprobs), len(rows.text_offset)}
        assert len(lengths) == 1
        assert choice.text.startswith(prompt)
        assert "".join(rows.tokens) == choice.text
        assert rows.token_logprobs[0] is None
        for token, logprob, top in zip(rows.tokens[1:], rows.token_logprobs[1:], rows.top_logprobs[1:], strict=True):
            assert top[token] == logprob


def test_models(client: OpenAI) -> None:
    [card] = client.models.list().data
    assert client.models.retrieve(card.id) == card


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"top_logprobs": 5}, openai.BadRequestError, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias"),
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
    ],
)
def test_errors_are_typed_and_name_the_field(
    client: OpenAI, fields: dict[str, object], kind: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{**GREEDY, "messages": QUESTION, **fields})
    assert str(caught.value.param).startswith(param)
    assert caught.value.body["message"]
    assert caught.value.request_id


def test_too_long_a_prompt(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is") as caught:
        client.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": "word " * 3000}])
    assert caught.value.code == "context_length_exceeded"


def test_what_newer_clients_send_is_accepted(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        **GREEDY, messages=[{"role": "developer", "content": "Be brief."}, *QUESTION], store=True, metadata={"a": "b"},
        service_tier="auto", user="me", prompt_cache_key="k", safety_identifier="s", verbosity="low",
        extra_body={"no_such_field": [1]}, extra_headers={"X-Request-Id": "abc-1"},
    )  # fmt: skip
    assert answer.choices[0].message.content
    assert answer._request_id == "abc-1"


def test_vectors_are_the_same_in_both_encodings(client: OpenAI) -> None:
    packed = client.embeddings.create(model=MODEL, input=["Hello", "world"])  # asks for base64
    plain = client.embeddings.create(model=MODEL, input=["Hello", "world"], encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.index == other.index
        assert one.embedding == pytest.approx(other.embedding)
    assert packed.usage == plain.usage
