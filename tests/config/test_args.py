"""EngineArgs: one definition of every option; what is refused at once, and what `resolve` makes of the rest."""

import json
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from octavo.config.args import EngineArgs, for_streaming
from octavo.engine.front import engine_args
from octavo.errors import InvalidParameterError, ModelNotFoundError, UnknownOptionError
from octavo.server.settings import resolve_settings

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
REFUSED: list[tuple[str, Any, str]] = [
    ("model_name", None, "must be a string"),
    ("tokenizer", 5, "must be a string"),
    ("dtype", "float8", "one of auto, float32, bfloat16, float16"),
    ("device", "tpu", "one of auto, cpu, cuda, mps, xpu"),
    ("max_model_len", 0, "an integer of at least 1"),
    ("max_model_len", 1, "at least 2: one token of prompt and one of output"),
    ("max_model_len", "4096", "must be an integer"),
    ("max_num_seqs", 0, "an integer of at least 1"),
    ("max_num_seqs", None, "must be an integer"),
    ("max_num_batched_tokens", 2048.0, "must be an integer"),
    ("block_size", True, "must be an integer"),
    ("num_kv_blocks", -1, "an integer of at least 1"),
    ("gpu_memory_utilization", 0.0, "greater than 0 and at most 1"),
    ("gpu_memory_utilization", 1.1, "greater than 0 and at most 1"),
    ("gpu_memory_utilization", float("nan"), "greater than 0 and at most 1"),
    ("gpu_memory_utilization", "0.9", "must be a number"),
    ("enable_prefix_caching", "no", "must be true or false"),
    ("enable_prefix_caching", None, "must be true or false"),
    ("generation_config", "vllm", "one of auto, none"),
    ("load_format", "zip", "one of auto, safetensors, pt, gguf, tensorizer, sharded_state, dummy"),
    ("seed", -1, "between 0 and 2^64 - 1"),
    ("seed", 2**64, "between 0 and 2^64 - 1"),
    ("seed", 1.5, "must be an integer"),
    ("priority_ageing_s", 0.0, "greater than 0"),
    ("priority_ageing_s", float("nan"), "greater than 0"),
    ("engine_process", 1, "must be true or false"),
    ("trust_remote_code", True, "not supported: Octavo never runs code from a checkpoint"),
]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


@pytest.mark.parametrize(("name", "value", "limit"), REFUSED, ids=lambda value: str(value)[:24])
def test_a_bad_value_names_option_value_and_limit(name: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        EngineArgs(**{name: value})
    assert (caught.value.field, caught.value.limit) == (name, limit)
    assert caught.value.value is value


@pytest.mark.parametrize(
    ("name", "value"),
    [("gpu_memory_utilization", 1), ("priority_ageing_s", 30), ("seed", 2**64 - 1), ("num_kv_blocks", 1)],
)
def test_the_nearest_good_values_are_taken(name: str, value: Any) -> None:
    assert getattr(EngineArgs(**{name: value}), name) == value


def test_a_misspelt_option_names_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="unknown engine option 'blocksize'; did you mean 'block_size'"):
        EngineArgs.from_options({"blocksize": 16})
    assert EngineArgs.from_options({"block_size": 16}) == EngineArgs(block_size=16)


def test_options_are_frozen_and_each_has_a_text() -> None:
    args = EngineArgs()
    with pytest.raises(FrozenInstanceError):
        args.seed = 1  # type: ignore[misc]
    assert all(spec.metadata["help"] for spec in fields(EngineArgs))


def test_resolve_hands_every_option_to_its_owner(folder: str) -> None:
    config = EngineArgs(
        model_name=folder,
        dtype="float32",
        device="cpu",
        max_model_len=48,
        max_num_seqs=7,
        max_num_batched_tokens=100,
        block_size=8,
        num_kv_blocks=9,
        gpu_memory_utilization=0.25,
        enable_prefix_caching=False,
        generation_config="none",
        load_format="dummy",
        seed=11,
        priority_ageing_s=2.5,
    ).resolve()
    assert (config.model.dtype, config.model.max_model_len, config.device) == ("float32", 48, "cpu")
    assert (config.cache.block_size, config.cache.num_kv_blocks) == (8, 9)
    assert (config.cache.gpu_memory_utilization, config.cache.enable_prefix_caching) == (0.25, False)
    scheduler = config.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.ageing_s) == (7, 100, 2.5)
    assert (config.load.load_format, config.load.seed, config.seed) == ("dummy", 11, 11)
    assert (config.tokenizer_path, config.use_generation_config) == (folder, False)


def test_defaults_come_from_the_checkpoint(folder: str) -> None:
    config = EngineArgs(model_name=folder).resolve()
    assert (config.model.dtype, config.model.max_model_len) == ("bfloat16", 64)
    assert (config.cache.num_kv_blocks, config.cache.gpu_memory_utilization) == (None, None)
    assert (config.seed, config.use_generation_config) == (None, True)


def test_every_running_request_gets_a_token_in_every_step(folder: str) -> None:
    config = EngineArgs(model_name=folder, max_num_seqs=256, max_num_batched_tokens=32).resolve()
    assert config.scheduler.max_num_seqs == 32


def test_a_tokenizer_of_its_own(folder: str, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    assert EngineArgs(model_name=folder, tokenizer=str(other)).resolve().tokenizer_path == str(other)


def test_a_context_beyond_the_models_own_is_refused(folder: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        EngineArgs(model_name=folder, max_model_len=65).resolve()
    assert (caught.value.field, caught.value.value) == ("max_model_len", 65)


def test_more_stages_than_layers_are_refused() -> None:
    assert EngineArgs(pipeline_parallel_size=6).resolve().parallel.world_size == 6
    with pytest.raises(InvalidParameterError, match=r"pipeline_parallel_size=7: at most 6"):
        EngineArgs(pipeline_parallel_size=7).resolve()


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no such folder"):
        EngineArgs(model_name=str(tmp_path / "nowhere")).resolve()


def test_chunks_follow_the_clock_where_answers_are_streamed() -> None:
    assert EngineArgs().resolve().scheduler.step_target_s == 0.0
    assert engine_args("demo", for_streaming({})).resolve().scheduler.step_target_s == 0.25
    assert engine_args("demo", for_streaming({"step_target_s": None})).resolve().scheduler.step_target_s == 0.25
    assert engine_args("demo", for_streaming({"step_target_s": 0.0})).resolve().scheduler.step_target_s == 0.0
    settings = resolve_settings({"model_name": "demo"}, {})
    assert settings.engine.resolve().scheduler.step_target_s == 0.25


def test_prefixes_are_kept_on_disk_where_answers_are_streamed() -> None:
    def num_bytes(options: dict[str, Any]) -> int:
        return engine_args("demo", options).resolve().cache.prefix_disk_bytes

    assert num_bytes({}) == 0
    assert num_bytes(for_streaming({})) == num_bytes({"prefix_cache_disk": 2.0}) == 2 << 30
    assert num_bytes(for_streaming({"prefix_cache_disk": 0})) == 0
    assert num_bytes({"prefix_cache_disk": 3, "data_parallel_size": 2}) == 3 << 29  # each replica's
    with pytest.raises(InvalidParameterError, match="no effect without enable_prefix_caching"):
        EngineArgs(prefix_cache_disk=1.0, enable_prefix_caching=False)
    assert num_bytes(for_streaming({"enable_prefix_caching": False})) == 0
