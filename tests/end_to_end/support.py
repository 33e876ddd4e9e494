"""Prompts for whole engines, and what of an answer must not change by a bit."""

from typing import Any

import torch
from tests.models.tiny import VOCAB_SIZE

from octavo import LLM
from octavo.inputs import TokensPrompt
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams

Answer = tuple[Any, ...]

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


def random_tokens(length: int, seed: int) -> list[int]:
    """Return token ids of the tiny models, none of them special."""
    tokens = torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in tokens]


def random_prompt(length: int, seed: int) -> TokensPrompt:
    return {"prompt_token_ids": random_tokens(length, seed)}


def answer(output: RequestOutput) -> list[Answer]:
    """Return everything about an answer that is promised to be the same by whatever path it came."""
    return [
        (sample.token_ids, sample.text, sample.logprobs, sample.cumulative_logprob, sample.seed, sample.finish_reason)
        for sample in output.outputs
    ] + [(output.prompt_logprobs,)]


def answers(outputs: list[RequestOutput]) -> list[list[Answer]]:
    return [answer(output) for output in outputs]


PROMPT = random_prompt(11, seed=3)


def complete(llm: LLM, **options: Any) -> CompletionOutput:
    """Continue PROMPT, greedily for 24 tokens unless told otherwise."""
    params = SamplingParams.from_options({**GREEDY, **options})
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
