"""Sampling in plain Python, one row at a time, slowly and by the definitions: what the tensors are compared with."""

import math
from collections.abc import Sequence

from octavo.sampling_params import SamplingParams

WORD = 0xFFFFFFFF


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 on Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return [c0, c1, c2, c3]


def noise_word(seed: int, output_index: int, token_id: int) -> int:
    """The 32 random bits behind one token's noise."""
    words = philox4x32((token_id >> 2, output_index, 0, 0), (seed & WORD, seed >> 32))
    return words[token_id & 3]


def gumbel(word: int) -> float:
    """-log(-log u) for u = (word + 1/2) / 2^32, by way of 1 - u where u is near 1."""
    u = (word + 0.5) / 2**32
    log_u = math.log1p(u - 1.0) if u > 0.5 else math.log(u)
    return -math.log(-log_u)


def distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The probability of each token after temperature, top-k, top-p and min-p."""
    max_logit = max(logits)
    weights = [math.exp((logit - max_logit) / params.temperature) for logit in logits]
    if 0 < params.top_k < len(logits):
        least = sorted(logits, reverse=True)[params.top_k - 1]
        weights = [weight if logit >= least else 0.0 for logit, weight in zip(logits, weights, strict=True)]
    total = math.fsum(weights)
    kept = [
        weight
        if math.fsum(w for w, o in zip(weights, logits, strict=True) if o > logit) < params.top_p * total
        and weight >= params.min_p
        else 0.0
        for weight, logit in zip(weights, logits, strict=True)
    ]
    return [weight / math.fsum(kept) for weight in kept]


def draw(logits: Sequence[float], params: SamplingParams, output_index: int) -> int:
    """The token that these logits and this seed must give."""
    if params.is_greedy:
        return max(range(len(logits)), key=lambda token_id: (logits[token_id], -token_id))
    assert params.seed is not None
    scores = [
        math.log(p) + gumbel(noise_word(params.seed, output_index, token_id)) if p > 0 else -math.inf
        for token_id, p in enumerate(distribution(logits, params))
    ]
    return max(range(len(scores)), key=lambda token_id: (scores[token_id], -token_id))


def process_logits(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_token_ids: Sequence[int] = (),
    bad_words_token_ids: Sequence[Sequence[int]] = (),
) -> list[float]:
    """The logits after penalties, bias, allowed ids, bad words and min_tokens."""
    processed = list(logits)
    for token_id in {*prompt, *output}:
        factor = params.repetition_penalty
        processed[token_id] = processed[token_id] * factor if processed[token_id] < 0 else processed[token_id] / factor
    for token_id in set(output):
        processed[token_id] -= params.frequency_penalty * list(output).count(token_id) + params.presence_penalty
    for token_id, bias in (params.logit_bias or {}).items():
        processed[token_id] += bias
    known = [*prompt, *output]
    banned = {word[-1] for word in bad_words_token_ids if known[len(known) - len(word) + 1 :] == list(word[:-1])}
    if len(output) < params.min_tokens:
        banned |= {*eos_token_ids, *params.stop_token_ids}
    if params.allowed_token_ids is not None:
        banned |= set(range(len(logits))) - set(params.allowed_token_ids)
    return [-math.inf if token_id in banned else logit for token_id, logit in enumerate(processed)]
