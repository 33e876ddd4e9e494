"""Expert-parallel ranks give what one rank gives, bit for bit; nothing has to divide."""

from dataclasses import replace

import pytest
import torch
from tests.breadth import pick
from tests.distributed.ranks import run_ranks
from tests.models.paged import PagedRunner, load
from tests.models.test_exactness import TOLERANCE, random_tokens
from tests.models.test_moe import NAMES
from tests.models.tiny import saved

from octavo.distributed.groups import ParallelGroups, Share
from octavo.layers.moe import Expert, ExpertParallelMoE, MixtureOfExperts
from octavo.models.common import DecoderLayer
from octavo.models.interfaces import CausalLM

NUM_TOKENS = pick(5, 12)
PROMPTS = [random_tokens(length, seed=length) for length in (1, 4, 23, 8)]


def dealing(groups: ParallelGroups) -> ParallelGroups:
    return replace(groups, experts=groups.tensor)


def mixtures(model: CausalLM) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


@pytest.mark.parametrize(("at", "name"), list(enumerate([*NAMES, "gpt-oss"]))[:: pick(2, 1)])
def test_two_and_four_ranks_give_the_tokens_of_one(at: int, name: str) -> None:
    folder, _ = saved(name)
    alone = load(folder)
    tokens = PagedRunner(alone).generate(PROMPTS, NUM_TOKENS)
    [logits] = PagedRunner(alone).step({0: PROMPTS[2]})
    loads = [mixture.load for mixture in mixtures(alone)]

    def body(groups: ParallelGroups) -> tuple[list[list[int]], torch.Tensor, list[torch.Tensor], int]:
        model = load(folder, groups=dealing(groups))
        results = PagedRunner(model).generate(PROMPTS, NUM_TOKENS), PagedRunner(model).step({0: PROMPTS[2]})[0]
        sharded = mixtures(model)
        assert all(isinstance(mixture, ExpertParallelMoE) for mixture in sharded)
        num_held = sum(isinstance(expert, Expert) for expert in sharded[0].experts)
        return *results, [mixture.load for mixture in sharded], num_held

    for size in pick(((2, 4)[at // 2 % 2],), (2, 4)):
        results = run_ranks(body, size)
        assert alone.config.experts is not None
        assert sum(num_held for *_, num_held in results) == alone.config.experts.num_experts
        for rank_tokens, rank_logits, rank_loads, _ in results:
            assert rank_tokens == tokens
            torch.testing.assert_close(rank_logits, logits, atol=TOLERANCE, rtol=0)
            assert torch.equal(rank_logits, results[0][1]), "ranks sample from the same logits"
            assert all(torch.equal(*both) for both in zip(rank_loads, loads, strict=True)), "each rank counts all"


@pytest.mark.parametrize("dtype", [*pick([], ["float32"]), "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2-moe", *pick([], ["qwen3-moe-one-of-13"]), "gpt-oss"])
def test_a_sharded_mixture_has_the_bits_of_a_whole_one(name: str, dtype: str) -> None:
    folder, _ = saved(name)
    alone = load(folder, dtype=dtype)
    if not alone.context.kernels.is_batch_invariant:
        pytest.skip(f"{alone.context.kernels.name} does not promise it")
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, length, 36, generator=generator).to(alone.context.dtype) for length in (0, 1, 2, 3, 37)]

    def outputs(model: CausalLM) -> list[torch.Tensor]:
        with torch.inference_mode():
            layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
            return [
                part
                for layer in layers
                if isinstance(layer.mlp, MixtureOfExperts)
                for x, residual in inputs
                for part in layer.mlp.forward(layer.mlp_norm, x, residual, None)
            ]

    expected = outputs(alone)

    def body(groups: ParallelGroups) -> list[torch.Tensor]:
        return outputs(load(folder, dtype=dtype, groups=dealing(groups)))

    for results in run_ranks(body, 3):
        assert all(torch.equal(*both) for both in zip(results, expected, strict=True))


def test_more_ranks_than_experts() -> None:
    folder, _ = saved("mixtral-window-all-experts")  # three
    tokens = PagedRunner(load(folder)).generate(PROMPTS, num_tokens=5)

    def body(groups: ParallelGroups) -> list[list[int]]:
        return PagedRunner(load(folder, groups=dealing(groups))).generate(PROMPTS, num_tokens=5)

    assert [Share.of(3, rank, 5).size for rank in range(5)].count(0) == 2
    assert run_ranks(body, 5) == [tokens] * 5
