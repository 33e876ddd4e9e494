"""The prompts of a request, taken apart."""

from collections.abc import Mapping
from typing import Any

from octavo.inputs import Prompt, TokensPrompt
from octavo.server.errors import bad_request


def split_prompts(given: str | list[str | int | list[int]], limit: int) -> list[Prompt]:
    """Return the prompts of a request: one text, one list of ids, or a list of either.

    Raises:
        ApiError: 400; none, too many, or a list that mixes kinds.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request("'prompt' must not be empty.", "prompt")
    token_ids = [item for item in given if isinstance(item, int)]
    if len(token_ids) == len(given):
        return [{"prompt_token_ids": token_ids}]
    prompts: list[Prompt] = []
    for item in given:
        if isinstance(item, int):
            raise bad_request("'prompt' mixes token ids with other kinds of prompts.", "prompt")
        prompts.append(item if isinstance(item, str) else {"prompt_token_ids": item})
    if len(prompts) > limit:
        raise bad_request(f"{len(prompts)} prompts: at most {limit} per request.", "prompt")
    return prompts


def truncated(prompt: Mapping[str, Any], most: int | None) -> TokensPrompt:
    """Return the last `most` tokens of a prompt; all without a limit.

    Raises:
        ApiError: 400; a limit that leaves nothing.
    """
    if most is not None and most < 1:
        raise bad_request(f"truncate_prompt_tokens={most}: at least 1", "truncate_prompt_tokens")
    token_ids: list[int] = prompt["prompt_token_ids"]
    return {"prompt_token_ids": token_ids if most is None else token_ids[-most:]}
