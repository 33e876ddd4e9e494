"""Reading `config.json`: every spelling that is in the wild, and a specific error for whatever is not served."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from octavo.config.families import FAMILIES
from octavo.config.hf import read_model_config
from octavo.config.layers import AttentionSpec, DenseSpec, LayerSpec, RopeConfig, RotarySpec
from octavo.config.model import GenerationDefaults, ModelConfig
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from octavo.models.interfaces import CausalLM

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 45,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


def write(folder: Path, config: object, generation: object = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def read(folder: Path, config: dict[str, Any], generation: object = None, **options: Any) -> ModelConfig:
    return read_model_config(write(folder, config, generation), model="tiny", **options)


def test_plain_llama(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    attention = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=6)
    layer = LayerSpec(attention, DenseSpec(intermediate_size=45))
    assert config == ModelConfig(
        model="tiny",
        path=str(tmp_path),
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        vocab_size=97,
        hidden_size=36,
        layers=(layer,) * 4,
        rotary=(RotarySpec(rope=RopeConfig(), width=6),),
        max_position_embeddings=64,
        max_model_len=64,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        YARN,
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False, "beta_fast": 16, "attention_factor": 0.9},
        {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_spellings_of_transformers_4_and_5_mean_the_same(tmp_path: Path, scaling: dict[str, Any]) -> None:
    bare = without(LLAMA, "torch_dtype")
    new = read(tmp_path, {**bare, "dtype": "float16", "rope_parameters": {**scaling, "rope_theta": 500.0}})
    old = read(tmp_path, {**bare, "torch_dtype": "float16", "rope_scaling": scaling, "rope_theta": 500.0})
    oldest = {**without(scaling, "rope_type"), "type": scaling["rope_type"]}
    assert old == new
    assert read(tmp_path, {**bare, "dtype": "float16", "rope_scaling": oldest, "rope_theta": 500.0}) == new
    assert (new.dtype, new.rotary[0].rope.kind, new.rotary[0].rope.theta) == ("float16", scaling["rope_type"], 500.0)


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        (None, 64),
        ({"rope_type": "linear", "factor": 2.5}, 160),
        ({"rope_type": "dynamic", "factor": 2.5}, 64),
        (YARN, 64),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 64),
    ],
)
def test_max_model_len_is_what_the_scaling_supports(tmp_path: Path, scaling: object, limit: int) -> None:
    config = {**LLAMA, "rope_scaling": scaling}
    assert read(tmp_path, config).max_model_len == limit
    assert read(tmp_path, config, max_model_len=limit - 1).max_model_len == limit - 1
    with pytest.raises(InvalidParameterError, match=f"max_model_len={limit + 1}: at most {limit}"):
        read(tmp_path, config, max_model_len=limit + 1)


def test_beyond_the_original_length_of_dynamic_scaling_is_explained(tmp_path: Path) -> None:
    config = {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    with pytest.raises(InvalidParameterError, match="depend on the batch"):
        read(tmp_path, config, max_model_len=65)


def test_absent_and_null_keys_mean_what_each_architecture_says(tmp_path: Path) -> None:
    no_kv = without({**LLAMA, "num_attention_heads": 32, "hidden_size": 64}, "num_key_value_heads")
    assert read(tmp_path, no_kv).attention(0).num_kv_heads == 32
    assert read(tmp_path, {**no_kv, "architectures": ["MistralForCausalLM"]}).attention(0).num_kv_heads == 8
    assert read(tmp_path, {**MISTRAL, "num_key_value_heads": None}).attention(0).num_kv_heads == 6
    assert read(tmp_path, QWEN3).attention(0).head_dim == 128
    assert read(tmp_path, {**QWEN3, "head_dim": 10}).attention(0).head_dim == 10
    assert read(tmp_path, QWEN2).attention(0).head_dim == 6
    assert read(tmp_path, without(LLAMA, "torch_dtype")).dtype == "float32"
    assert read(tmp_path, without(LLAMA, "architectures")).architecture == "LlamaForCausalLM"


def test_biases_are_the_architectures_own(tmp_path: Path) -> None:
    def biases(config: dict[str, Any]) -> tuple[bool, bool, bool, bool]:
        model = read(tmp_path, {**config, "attention_bias": True, "mlp_bias": True})
        assert model.dense is not None
        spec = model.attention(0)
        return spec.has_bias, spec.has_out_bias, model.dense.has_bias, spec.head_norms is not None

    assert biases(LLAMA) == (True, True, True, False)
    assert biases(QWEN3) == (True, True, False, True)
    assert biases(QWEN2) == (True, False, False, False)
    assert read(tmp_path, QWEN2).attention(0).has_bias
    assert not read(tmp_path, QWEN3).attention(0).has_bias


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL, (4096,) * 4),
        ({**MISTRAL, "sliding_window": 7}, (7,) * 4),
        ({**MISTRAL, "sliding_window": None}, (None,) * 4),
        ({**QWEN2, "sliding_window": 7}, (None,) * 4),
        ({**QWEN2, "sliding_window": 7, "use_sliding_window": True}, (None,) * 4),
        ({**QWEN2, "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 7)),
        (
            {
                **QWEN3,
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (7, None, 7, None),
        ),
        ({**LLAMA, "layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)
def test_sliding_windows(tmp_path: Path, config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(tmp_path, config).sliding_windows == windows


def test_window_without_effect_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(tmp_path, {**LLAMA, "sliding_window": 7}).sliding_windows == (None,) * 4
    assert "sliding_window has no effect" in caplog.text


def test_end_tokens_and_sampling_defaults(tmp_path: Path) -> None:
    listed = read(tmp_path, {**LLAMA, "eos_token_id": [2, 5]})
    assert (listed.eos_token_ids, listed.generation) == ((2, 5), GenerationDefaults())
    assert read(tmp_path, {**LLAMA, "bos_token_id": -1}).bos_token_id is None
    sampling: dict[str, Any] = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
    }
    config = read(tmp_path, LLAMA, {**sampling, "eos_token_id": [7, 8], "do_sample": True, "max_new_tokens": 9})
    assert config.eos_token_ids == (7, 8)
    assert config.generation == GenerationDefaults(**sampling, max_tokens=9)
    greedy = read(tmp_path, LLAMA, {**sampling, "do_sample": False}).generation
    assert greedy == GenerationDefaults(repetition_penalty=1.05)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("top_p", 0.0, None),
        ("top_p", 1.5, None),
        ("top_k", 50.0, 50),
        ("top_k", 2.5, None),
        ("top_k", -1, -1),
        ("top_k", "50", None),
        ("temperature", 0, 0.0),
        ("temperature", -0.5, None),
        ("min_p", True, None),
        ("repetition_penalty", 0, None),
        ("max_new_tokens", 0, None),
        ("max_new_tokens", 512.0, 512),
        ("do_sample", "yes", None),
        ("temperature", None, None),
        ("top_p", float("nan"), None),
    ],
)
def test_odd_sampling_defaults_are_ignored_with_a_warning(
    key: str, value: object, expected: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = read(tmp_path, LLAMA, {key: value}).generation
    name = "max_tokens" if key == "max_new_tokens" else key
    assert found == replace(GenerationDefaults(), **({} if expected is None else {name: expected}))
    assert (f"{key}={value!r} is ignored" in caplog.text) == (expected is None and value is not None)


@pytest.mark.parametrize(
    "named",
    [
        *([], None, ["LLaMAForCausalLM"], ["LlamaModel"], ["Other", "LlamaForCausalLM"], "LlamaForCausalLM"),
        *(["PeftModelForCausalLM"], ["FSDPLlamaForCausalLM"], ["OptimizedModule"]),
    ],
)
def test_an_architecture_that_is_not_named_follows_from_the_type(named: object, tmp_path: Path) -> None:
    assert read(tmp_path, {**LLAMA, "architectures": named, "model_type": "llama"}).architecture == "LlamaForCausalLM"
    with pytest.raises(UnsupportedModelError, match="architecture 'LlamaForSequenceClassification' is not supported"):
        read(tmp_path, {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "model_type": "llama"})


@pytest.mark.parametrize(
    ("file_name", "own", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "sym": True}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "awq"),
        ("quant_config.json", {"something": "else"}, None),
    ],
)
def test_quantization_in_a_file_of_its_own(
    file_name: str, own: dict[str, Any], method: str | None, tmp_path: Path
) -> None:
    (tmp_path / file_name).write_text(json.dumps(own))
    found = read(tmp_path, LLAMA).quantization
    assert (found.method if found else None) == method
    stated = read(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "fp8"}}).quantization
    assert stated is not None
    assert stated.method == "fp8"


def test_files_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    plain = read(tmp_path, LLAMA)
    file = tmp_path / "config.json"
    file.write_text(file.read_text(), encoding="utf-8-sig")
    assert read_model_config(tmp_path, model=plain.model) == plain


def test_attn_factor_multiplies_what_yarn_has_anyway(tmp_path: Path) -> None:
    scaling = {**YARN, "attn_factor": 0.8782488562869419}  # as DeepSeek-R1-0528-Qwen3-8B has it
    assert read(tmp_path, {**LLAMA, "rope_scaling": scaling}).rotary[0].rope.attention_factor == pytest.approx(1.0)
    both = {**scaling, "attention_factor": 0.9, "extrapolation_factor": 1.0}
    assert read(tmp_path, {**LLAMA, "rope_scaling": both}).rotary[0].rope.attention_factor == 0.9
    with pytest.raises(UnsupportedModelError, match=r"extrapolation_factor=0\.5"):
        read(tmp_path, {**LLAMA, "rope_scaling": {**YARN, "extrapolation_factor": 0.5}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config: quant_method="),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 2]}}, "mrope_section="),
        ({"use_mrope": True}, "use_mrope=True"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"architectures": ["LlamaForCausalML"]}, "did you mean 'LlamaForCausalLM'"),
        ({"architectures": ["T5Model"]}, "docs/models.md lists the families that are"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "'chunked_attention'"),
        (
            {**MISTRAL, "sliding_window": 7, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            "all layers are of one type",
        ),
    ],
)
def test_what_is_not_served_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read(tmp_path, {**LLAMA, **change})
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "36"}, "hidden_size='36': an integer is expected"),
        ({"hidden_size": 37}, "hidden_size=37: a multiple of num_attention_heads"),
        ({"hidden_size": True}, "hidden_size=True: an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: at least 1"),
        ({"num_key_value_heads": 4}, "num_attention_heads=6: a multiple of num_key_value_heads"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small': a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1: true or false"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype='float8_e4m3fn': unknown dtype"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"architectures": 7}, "architectures=7: a list of strings"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear': an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: the key 'factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 3.0}},
            "rope_parameters has 3",
        ),
        ({"rope_scaling": {**YARN, "rope_type": "llama3"}}, "'low_freq_factor' is missing"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 32}, "=32: the rotary settings say 16"),
        ({"layer_types": ["full_attention"]}, "layer_types: 4 entries"),
        (
            {"rope_scaling": {**YARN, "rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "low_freq_factor=4.0",
        ),
    ],
)
def test_malformed_values_name_the_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, {**LLAMA, **change})
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"]
)
def test_missing_keys_are_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: the key '{key}' is missing"):
        read(tmp_path, without(LLAMA, key))


@pytest.mark.parametrize(("text", "message"), [('{"a": ', "not valid JSON"), ("[1]", "object"), ("", "JSON")])
def test_bad_json(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"config.json.*{message}"):
        read_model_config(tmp_path, model="tiny")
    write(tmp_path, LLAMA)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"generation_config.json.*{message}"):
        read_model_config(tmp_path, model="tiny")


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: No such file"):
        read_model_config(tmp_path, model="tiny")


def test_dtype_option(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA, dtype="float32").dtype == "float32"
    with pytest.raises(InvalidParameterError, match="dtype='int8'"):
        read(tmp_path, LLAMA, dtype="int8")


def test_every_family_has_a_class() -> None:
    for family in FAMILIES.values():
        module, _, name = family.model.partition(":")
        assert issubclass(getattr(import_module(module), name), CausalLM)


def test_reading_a_configuration_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, octavo.config.hf, octavo.config.hub; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "max_position_embeddings"]
)
@pytest.mark.parametrize("value", [2**31, 2**62, 2**70])
def test_sizes_that_no_model_has(key: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {key}={value}: at most"):
        read(tmp_path, {**LLAMA, key: value})


@pytest.mark.parametrize("value", [2**40, 2**70, [1, 2**70]])
def test_end_tokens_that_no_vocabulary_has(value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id=.* a token id or a list"):
        read(tmp_path, {**LLAMA, "eos_token_id": value})
