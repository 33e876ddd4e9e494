"""Ranks that share every layer give what one rank gives: the same greedy tokens in float32, whatever divides or not."""

from pathlib import Path

import pytest
import torch
from tests.breadth import pick
from tests.distributed.rank_process import run_in_processes
from tests.distributed.ranks import run_ranks
from tests.models.paged import PagedRunner, load
from tests.models.test_exactness import random_tokens
from tests.models.tiny import TINY_MODELS, TinyModel, saved

from octavo.config.hf import read_model_config
from octavo.distributed.groups import ParallelGroups
from octavo.kernels.dispatch import native_kernels

NUM_TOKENS = pick(5, 12)
PROMPTS = [random_tokens(length, seed=length) for length in (1, 4, 23, 8)]


@pytest.mark.parametrize(
    ("at", "case"), list(enumerate(TINY_MODELS))[:: pick(4, 1)], ids=lambda value: getattr(value, "name", "")
)
def test_every_architecture_on_two_and_four_ranks(at: int, case: TinyModel) -> None:
    folder, _ = saved(case.name)
    alone = load(folder)
    tokens = PagedRunner(alone).generate(PROMPTS, NUM_TOKENS)
    [logits] = PagedRunner(alone).step({0: PROMPTS[2]})

    def body(groups: ParallelGroups) -> tuple[list[list[int]], torch.Tensor]:
        model = load(folder, groups=groups)
        return PagedRunner(model).generate(PROMPTS, NUM_TOKENS), PagedRunner(model).step({0: PROMPTS[2]})[0]

    for size in {min(size, alone.config.max_tensor_parallel_size) for size in pick(((2, 4)[at % 2],), (2, 4))}:
        results = run_ranks(body, size)
        for rank_tokens, rank_logits in results:
            assert rank_tokens == tokens
            torch.testing.assert_close(rank_logits, logits, atol=case.tolerance, rtol=0)
            assert torch.equal(rank_logits, results[0][1]), "ranks sample from the same logits"


def greedy_tokens(groups: ParallelGroups, folders: list[str]) -> list[list[list[int]]]:
    """Continue the prompts by each model: one rank's work."""
    return [PagedRunner(load(Path(folder), groups=groups)).generate(PROMPTS, NUM_TOKENS) for folder in folders]


@pytest.mark.full  # by default tests/end_to_end/test_tensor_parallel.py has ranks in processes
@pytest.mark.parametrize("size", [2, 4])
def test_architectures_in_processes(size: int) -> None:
    folders = [str(saved(case.name)[0]) for case in TINY_MODELS]
    folders = [each for each in folders if read_model_config(Path(each), model="m").max_tensor_parallel_size >= size]
    alone = greedy_tokens(ParallelGroups(), folders)
    assert run_in_processes("tests.models.test_tensor_parallel:greedy_tokens", [folders], size) == [alone] * size


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "int4")]
)
@pytest.mark.parametrize("name", ["qwen3-tied-gqa-8", pytest.param("llama-biases", marks=pytest.mark.full)])
def test_logits_have_the_same_bits_alone_and_in_company(name: str, dtype: str, quantization: str | None) -> None:
    if quantization is not None and native_kernels() is None:
        pytest.skip("only the C++ kernels quantize")
    folder, _ = saved(name)
    tokens, others = random_tokens(40, seed=1), {request: random_tokens(request + 2, seed=2) for request in range(1, 9)}

    def body(groups: ParallelGroups) -> tuple[bool, torch.Tensor, torch.Tensor]:
        model = load(folder, dtype=dtype, groups=groups, quantization=quantization)
        [alone] = PagedRunner(model).step({0: tokens})
        runner = PagedRunner(model, num_blocks=128, seed=3)
        pieces = [runner.step({0: tokens[:7], **others})[0], runner.step({3: [5], 0: tokens[7:]})[1]]
        promises = model.context.kernels.is_batch_invariant and model.context.attention.is_batch_invariant
        return promises, alone, torch.cat(pieces)

    for promises, alone, together in run_ranks(body, 2):
        if not promises:
            pytest.skip("these kernels do not promise it")
        assert torch.equal(alone, together)
