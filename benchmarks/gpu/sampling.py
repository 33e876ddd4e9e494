"""What the sampler does with rows of logits on the device: edit, draw, rate. Beside torch's ops, to the bit.

Legend: L = rows, V = vocabulary size, C = tokens of a context.
"""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.cases import Case
from octavo.sampling.draw import SamplingMetadata, draw, draw_by_torch
from octavo.sampling.logits_processors import Context, LogitsProcessorTensors, process_by_torch, process_logits
from octavo.sampling.logprobs import rate, rate_by_torch

_WORD_BITS = 32


def sampling_cases(num_rows: int, vocab_size: int, context: int, device: torch.device) -> Iterator[Case]:
    """Rows ask for everything: penalties over C tokens, half of them a prompt; masks; filters; log-probabilities."""
    logits = torch.randn(num_rows, vocab_size, device=device) * 3.0
    metadata = _metadata(num_rows, context, device)
    yield _process_logits(logits, metadata, context)
    yield from _draws(logits, metadata)
    max_logit, token_ids = logits.max(-1).values, torch.arange(num_rows, device=device)
    yield Case(
        name="rate",
        run=partial(rate, logits, max_logit, token_ids, metadata.num_logprobs),
        define=partial(rate_by_torch, logits, token_ids),
        num_bytes=logits.nbytes,
        is_exact=True,
    )


def _process_logits(logits: torch.Tensor, metadata: SamplingMetadata, context: int) -> Case:
    (num_rows, vocab_size), device = logits.shape, logits.device
    rows = torch.arange(num_rows, device=device)
    tokens = torch.randint(vocab_size, (num_rows, context), dtype=torch.int32, device=device)
    known = Context(token_ids=tokens, rows=rows, num_tokens=torch.full_like(rows, context), max_tokens=context)
    words = num_rows, -(-vocab_size // _WORD_BITS)
    masks = torch.randint(-(2**31), 2**31, words, dtype=torch.int32, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    processors = LogitsProcessorTensors(
        masks=masks, biased=none, biases=none.float(), bad_rows=none, bad_lens=none,
        bad_tokens=none.view(0, 0), banned=none,
    )  # fmt: skip
    return Case(
        name="edit",
        run=partial(process_logits, logits, metadata, known, processors),
        define=partial(process_by_torch, logits, metadata, known, masks),
        num_bytes=2 * logits.nbytes + masks.nbytes + tokens.nbytes,
        is_exact=True,
    )


def _draws(logits: torch.Tensor, metadata: SamplingMetadata) -> Iterator[Case]:
    """Draw from all tokens, and from those that filters leave."""

    def define(*, is_filtered: bool) -> torch.Tensor:
        rows = (slice(at, at + 1) for at in range(len(logits)))
        return torch.cat([draw_by_torch(logits[row], metadata.rows(row), is_filtered=is_filtered) for row in rows])

    for name, is_filtered in (("draw", False), ("draw, filtered", True)):
        yield Case(
            name=name,
            run=partial(_drawn, logits, metadata, is_filtered=is_filtered),
            define=partial(define, is_filtered=is_filtered),
            num_bytes=2 * logits.nbytes,  # once for the largest
            is_exact=True,
        )


def _drawn(logits: torch.Tensor, metadata: SamplingMetadata, *, is_filtered: bool) -> torch.Tensor:
    return draw(logits, metadata, is_filtered=is_filtered)[1]


def _metadata(num_rows: int, context: int, device: torch.device) -> SamplingMetadata:
    def column(value: float) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=torch.float64, device=device)

    seeds = torch.arange(num_rows, device=device)
    return SamplingMetadata(
        temperature=column(0.5), seed_low=seeds, seed_high=seeds, output_indices=seeds,
        top_k=torch.full_like(seeds, 50), top_p=column(0.95), min_p=column(0.0), num_logprobs=seeds,
        repetition=column(1.3), presence=column(0.5), frequency=column(0.1),
        num_prompt_tokens=torch.full_like(seeds, context // 2), mask_indices=seeds,
    )  # fmt: skip
