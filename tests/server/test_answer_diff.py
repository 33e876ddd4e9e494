"""The first place at which two answers differ."""

import json
from typing import Any

from octavo.server.logged.answer_diff import (
    Difference,
    TokenDifference,
    first_difference,
    first_token_difference,
    uncompared_differences,
)


def whole(*contents: str, cached: int = 0, **more: Any) -> bytes:
    choices = [{"index": n, "message": {"content": text, **more}} for n, text in enumerate(contents)]
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": cached}}
    return json.dumps({"id": "x", "choices": choices, "usage": usage, "system_fingerprint": f"{cached}"}).encode()


def stream(*events: tuple[int, Any], end: Any = "[DONE]", running: int = 0) -> bytes:
    made = [
        {"choices": [{"index": n, "delta": delta}], "usage": {"total": running * i}}
        for i, (n, delta) in enumerate(events)
    ]
    frames = [json.dumps(event) for event in made] + ([end] if end else [])
    return "".join(f"data: {frame}\n\n" for frame in frames).encode()


def test_whole_answers() -> None:
    pair = b'{"cached_tokens":1,"system_fingerprint":"a"}', b'{"cached_tokens":20,"system_fingerprint":"a"}'
    assert uncompared_differences(*pair) == ["cached_tokens"]
    assert uncompared_differences(pair[0], pair[0].replace(b'"a"', b'"b"')) == ["system_fingerprint"]
    assert first_difference(whole("a", cached=1), whole("a", cached=2), is_stream=False) is None
    found = first_difference(whole("a", "x" * 50 + "bc"), whole("a", "x" * 50 + "bd"), is_stream=False)
    around = "..." + repr("x" * 29 + "b")[:-1]
    assert found == Difference(
        where="choices[1].message.content", position=51, logged=around + "c'", replayed=around + "d'"
    )
    found = first_difference(whole("a"), whole("ab"), is_stream=False)
    assert found is not None
    assert (found.position, found.logged, found.replayed) == (1, "'a'", "'ab'")
    found = first_difference(whole("a", call=[1, 2]), whole("a", call=[1]), is_stream=False)
    assert found == Difference(where="choices[0].message.call[1]", logged="2", replayed="(nothing)")
    found = first_difference(whole("a", logprob=-0.5), whole("a", logprob=-0.25), is_stream=False)
    assert found == Difference(where="choices[0].message.logprob", logged="-0.5", replayed="-0.25")


def test_streams() -> None:
    ours = stream(
        (0, {"role": "assistant"}), (0, {"content": "a"}), (1, {"content": "x"}), (0, {"content": "b"}), running=1
    )
    turns = stream(
        (0, {"role": "assistant"}), (1, {"content": "x"}), (0, {"content": "a"}), (0, {"content": "b"}), running=1
    )
    assert first_difference(ours, turns, is_stream=True) is None
    assert uncompared_differences(ours, turns) == ["the turns of its choices"]
    other = ours.replace(b'"b"', b'"c"')
    found = first_difference(ours, other, is_stream=True)
    assert found == Difference(where="choices[0].delta.content", position=1, logged="'ab'", replayed="'ac'")
    short = b"".join(frame + b"\n\n" for frame in ours.split(b"\n\n")[:3])
    assert first_difference(short, other, is_stream=True, is_partial=True) is None
    assert first_difference(short, other, is_stream=True) is not None
    found = first_difference(ours, ours.replace(b"data: [DONE]", b'data: {"error": 1}'), is_stream=True)
    assert found is not None
    assert found.where == "events[0]"
    found = first_difference(
        stream((0, {"content": "a"}), (0, {"content": "b"})), stream((0, {"content": "ab"})), is_stream=True
    )
    assert found is not None
    assert found.where.startswith("choices[0] events[0]")


def test_streams_of_calls() -> None:
    def call(text: str, index: int = 0) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    ours = stream((0, call("{")), (0, call("}")), (0, call("[1]", 1)))
    found = first_difference(ours, stream((0, call("{")), (0, call("}")), (0, call("[2]", 1))), is_stream=True)
    assert found is not None
    assert (found.where, found.position) == ("choices[0].delta.tool_calls[1].function.arguments", 1)


def test_tokens() -> None:
    assert first_token_difference([[1, 2], [3]], [[1, 2], [3]]) is None
    found = first_token_difference([[1, 2], [3, 4]], [[1, 2], [3, 5]])
    assert found == TokenDifference(choice=1, position=1, logged=4, replayed=5)
    found = first_token_difference([[1]], [[1, 2]])
    assert found == TokenDifference(choice=0, position=1, logged=None, replayed=2)
    assert first_token_difference([[1]], [[1, 2]], is_partial=True) is None
    assert first_token_difference([[1, 2]], [[1]], is_partial=True) is not None
