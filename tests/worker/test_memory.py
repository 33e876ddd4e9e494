"""Memory estimates: models rejected before loading, and the number of blocks that fit."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models.paged import load, make_context
from tests.models.tiny import TINY_MODELS

from octavo.config.args import EngineArgs
from octavo.config.engine import CacheConfig, SchedulerConfig
from octavo.config.hf import read_model_config
from octavo.config.hub import resolve_model
from octavo.config.model import ModelConfig
from octavo.config.parallel import ALONE, Rendezvous, Stage
from octavo.contracts.kv_cache import KVCacheSpec, KVGroup, KVGroupSpec, KVPart
from octavo.errors import InsufficientMemoryError
from octavo.kernels.quantization import WeightFormat, get_quantization
from octavo.kernels.reference import Kernels
from octavo.layers.linear import MergedLinear
from octavo.layers.moe import ExpertRouter
from octavo.layers.quant.registry import make_schemes
from octavo.layers.vocabulary import LogitsHead
from octavo.models.registry import initialize_model
from octavo.worker.memory import (
    MemoryReport,
    check_length_fits,
    check_weights_fit,
    choose_num_blocks,
    empty_model,
    kv_budget,
    num_weights,
    weights_bytes,
)
from octavo.worker.stages import plan_stages
from octavo.worker.worker import Worker

FULL = KVGroupSpec(group=KVGroup(), layers=(0, 1), parts=(KVPart((2, 8), "bfloat16", 2),) * 2)
SPEC = KVCacheSpec(block_size=16, groups=(FULL,))
(BLOCK_BYTES,) = SPEC.bytes_per_block
LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, ageing_s=1.0)
CACHE = CacheConfig(block_size=16, num_kv_blocks=None, gpu_memory_utilization=None, enable_prefix_caching=True)


@pytest.fixture
def model() -> ModelConfig:
    return replace(read_model_config(resolve_model("demo"), model="demo"), max_model_len=100)


def report(kv_bytes: int) -> MemoryReport:
    return MemoryReport(budget_bytes=1 << 29, weights_bytes=0, activation_bytes=0, kv_bytes=kv_bytes)


class Packing(Kernels):
    """Kernels whose packed weights are copies, and which compute with every form."""

    packing_copies = True

    def computes(self, form: WeightFormat) -> bool:
        return True


def held(
    model: ModelConfig, quantization: str | None = None, stage: Stage | None = None, kernels: Kernels | None = None
) -> int:
    """Return the bytes of a model, or of a stage of it, in its dtype."""
    context = replace(
        make_context(), kernels=kernels or Packing(), dtype=getattr(torch, model.dtype), device=torch.device("meta")
    )
    context = replace(context, stage=stage, schemes=make_schemes(None, quantization))
    return weights_bytes(initialize_model(model, context))


def test_a_tied_head_counts_twice_where_packing_copies_it(model: ModelConfig) -> None:
    assert model.tie_word_embeddings
    plain = held(model, kernels=Kernels())
    assert plain == 2 * num_weights(empty_model(model))
    assert held(model) == plain + 2 * model.vocab_size * model.hidden_size


@pytest.mark.parametrize("is_tied", [True, False])
def test_integers_take_what_their_format_says(model: ModelConfig, is_tied: bool) -> None:
    model = replace(model, tie_word_embeddings=is_tied)
    int8, spec = held(model, "int8"), model.attention(0)
    assert model.dense is not None
    rows = model.num_layers * (
        (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        + 2 * model.dense.intermediate_size
        + 2 * model.hidden_size
    )
    embedding = model.vocab_size * model.hidden_size
    in_integers = num_weights(empty_model(model)) - embedding * (1 if is_tied else 2)
    of_heads = 0 if spec.head_norms is None else 2 * spec.head_dim
    norms = model.num_layers * (2 * model.hidden_size + of_heads) + model.hidden_size
    # Two bytes for the embedding and norms, one for the rest and for the logits head, four for each output's scale.
    expected = 2 * (embedding + norms) + in_integers - norms + embedding + 4 * (rows + model.vocab_size)
    assert int8 == expected
    assert held(model, "fp8") == expected
    assert held(model, "int4") < int8


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_stages_share_the_weights_and_no_more(model: ModelConfig, is_tied: bool, quantization: str | None) -> None:
    """A tied table is on both end stages, as the whole model's is where packing copies it: embedding and head."""
    model = replace(model, tie_word_embeddings=is_tied)
    whole, stages = held(model, quantization), plan_stages(model, 3)
    parts = [held(model, quantization, stage) for stage in stages]
    assert sum(parts) == whole
    assert parts[1] * model.num_layers < whole * len(stages[1].layers)
    assert parts[0] > 2 * model.vocab_size * model.hidden_size


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_experts_in_integers_are_counted_one_by_one(name: str, tmp_path: Path) -> None:
    next(tiny for tiny in TINY_MODELS if tiny.name == "qwen2-moe-windows").save(tmp_path)
    config = read_model_config(tmp_path, model="tiny", dtype="bfloat16")
    quantization = get_quantization(name)
    linears = [
        module
        for module in load(tmp_path).modules()
        if isinstance(module, MergedLinear) and not isinstance(module, ExpertRouter | LogitsHead)
    ]
    assert len(linears) == 3 * 2 + 2 * 2 + 6 * 2  # attention, two plain MLPs, five experts and a shared one
    shapes = [(sum(part.size for part in module.parts.values()), module.inputs.size) for module in linears]
    plain = num_weights(empty_model(config)) - sum(num_outputs * in_size for num_outputs, in_size in shapes)
    logits = (config.vocab_size, config.hidden_size)
    expected = 2 * (plain - logits[0] * logits[1]) + quantization.logits.num_bytes(*logits)
    expected += sum(quantization.linear.num_bytes(*shape) for shape in shapes)
    assert held(config, name) == expected


def test_a_model_that_cannot_fit_is_refused_with_both_numbers(model: ModelConfig) -> None:
    check_weights_fit(model, 5_000_000, 100, 100)
    with pytest.raises(InsufficientMemoryError, match=r"demo: 5 M weights in .* need 2\.00 GiB.* may use 1\.00 GiB"):
        check_weights_fit(model, 5_000_000, 2 << 30, 1 << 30)


def test_blocks_fill_what_is_left_but_no_more_than_is_useful(model: ModelConfig) -> None:
    assert BLOCK_BYTES == 2 * 2 * 2 * 8 * 16 * 2
    assert choose_num_blocks(model, CACHE, SPEC, report(50 * BLOCK_BYTES + 1), LIMITS) == [50]
    # Seven blocks hold 100 tokens; eight such requests, and as much again for cached prefixes.
    assert choose_num_blocks(model, CACHE, SPEC, report(10**12), LIMITS) == [2 * 8 * 7]


def test_an_override_counts_whatever_the_memory(model: ModelConfig) -> None:
    assert choose_num_blocks(model, replace(CACHE, num_kv_blocks=9), SPEC, report(0), LIMITS) == [9]


def test_less_than_one_full_request_is_refused_with_the_way_out(model: ModelConfig) -> None:
    with pytest.raises(InsufficientMemoryError, match="max_model_len to at most 96"):
        choose_num_blocks(model, CACHE, SPEC, report(6 * BLOCK_BYTES), LIMITS)


def test_the_log_says_what_the_memory_is_worth(model: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choose_num_blocks(model, CACHE, SPEC, report(50 * BLOCK_BYTES), LIMITS)
    assert "50 blocks of 16 tokens" in caplog.text
    assert "800 tokens, or 8.0 requests of the full 100 tokens" in caplog.text


def test_groups_share_memory_so_that_most_full_requests_fit(
    model: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """A request of 10,000 tokens holds 625 blocks of full attention, and 14 of a window of 64 with chunks of 64."""
    window = replace(FULL, group=KVGroup(sliding_window=64), layers=(2, 3))
    spec = KVCacheSpec(block_size=16, groups=(FULL, window))
    model, kv_bytes = replace(model, max_model_len=10_000), 3 * (625 + 14) * BLOCK_BYTES
    assert window.group.peak_blocks(10_000, 16, 64) == -(-(64 + 64 + 64 + 8) // 16) + 1 == 14
    with caplog.at_level(logging.INFO):
        assert choose_num_blocks(model, CACHE, spec, report(kv_bytes), LIMITS) == [3 * 625, 3 * 14]
    assert "1875 and 42 blocks of 16 tokens" in caplog.text
    assert "30,000 tokens, or 3.0 requests of the full 10000 tokens" in caplog.text
    with pytest.raises(InsufficientMemoryError, match=r"625 and 14 blocks of 16.* max_model_len to at most 1376"):
        choose_num_blocks(model, CACHE, spec, report(100 * BLOCK_BYTES), LIMITS)


def test_the_kv_budget_is_the_smaller_of_share_and_free_memory() -> None:
    gib = 1 << 30
    assert kv_budget(8 * gib, 100 * gib, 2 * gib, gib) == 5 * gib
    assert kv_budget(8 * gib, 3 * gib, 2 * gib, gib) == 2 * gib - (128 << 20)
    assert kv_budget(8 * gib, gib, 9 * gib, gib) == 0


def test_blocks_have_room_for_a_draft_model(tmp_path: Path) -> None:
    """Its keys and values are in the blocks of the group that keeps what its layers see."""
    folders: dict[str, Path] = {}
    for name in ("qwen3-mixed-windows", "llama-multi-head"):
        [case] = [case for case in TINY_MODELS if case.name == name]
        case.save(folders.setdefault(name, tmp_path / name))
    model, draft = (str(folders[name]) for name in ("qwen3-mixed-windows", "llama-multi-head"))
    plain, alone, drafted = (
        Worker(EngineArgs(model_name=name, speculative_config=config).resolve(), ALONE, Rendezvous())
        for name, config in ((model, None), (draft, None), (model, {"model": draft}))
    )
    of_draft = alone.kv_cache_spec.bytes_per_block
    added = [
        big - small
        for big, small in zip(drafted.kv_cache_spec.bytes_per_block, plain.kv_cache_spec.bytes_per_block, strict=True)
    ]
    windows = [spec.group.sliding_window for spec in plain.kv_cache_spec.groups]
    assert added == [0 if window else of_draft[0] for window in windows]
    assert len(added) > 1


def test_a_length_whose_rotary_table_cannot_fit_is_refused(model: ModelConfig) -> None:
    check_length_fits(model, 1 << 30)
    with pytest.raises(InsufficientMemoryError, match=r"max_model_len=2147483647: .* needs .* may use 1\.00 GiB"):
        check_length_fits(replace(model, max_model_len=2**31 - 1), 1 << 30)
