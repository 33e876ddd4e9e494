"""How many places in the queue a request takes."""

import pytest

from octavo.server.args import ServerArgs
from octavo.server.openai.params import num_samples
from octavo.server.openai.protocol import ChatCompletionRequest, ChatMessage, CompletionRequest

ARGS = ServerArgs(max_n=8, max_prompts=4)


@pytest.mark.parametrize(
    ("prompt", "n", "expected"),
    [
        ("text", None, 1),
        ("text", 3, 3),
        ([1, 2, 3], 2, 2),
        (["a", "b"], 2, 4),
        ([[1, 2], [3]], None, 2),
        ([], None, 1),
        ("text", 10**9, 8),  # will be refused, and is not to fill the queue until then
        ("text", -5, 1),
        (["a"] * 100, None, 4),
    ],
)
def test_samples_of_completions(prompt: str | list[str | int | list[int]], n: int | None, expected: int) -> None:
    assert num_samples(CompletionRequest(prompt=prompt, n=n), ARGS) == expected


def test_samples_of_a_chat() -> None:
    request = ChatCompletionRequest(messages=[ChatMessage(role="user", content="hi")], n=2)
    assert num_samples(request, ARGS) == 2
